"""The training ranks of a run on a Ray cluster: reserves their resources, starts their processes, and passes on their output.

Knows the actors of ranks; does not know what a rank computes. All methods block.
"""

from __future__ import annotations

import codecs
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from turnwise.errors import ConfigError, EngineError
from turnwise.options.engines import ClusterSection, RanksSection
from turnwise.ray_workers import ray_api
from turnwise.ray_workers.ray_api import RankStart, WorkerLost

__all__ = ["RayRanks"]

_WAIT = 1.0
"""Seconds of one look for resources or started actors: signals are handled in between."""
_NOTICE = 10.0
"""Seconds without resources, after which a message says what is missing."""
_DRAIN = 10.0
"""Seconds in which the last output of an ended rank must arrive."""
_LOST = -9
"""The exit status of a rank whose machine is lost: that of a killed process."""
_FORWARDED = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "COLUMNS")
"""Environment variables of the command that say how text is displayed."""


@dataclass(slots=True)
class _Rank:
    """A rank as the command sees it."""

    actor: Any
    place: str = "place unknown"
    ended: Any = None
    """The reference of its exit status."""
    output: Any = None
    """The reference of its next output; None after the last one."""
    status: int | None = None
    reason: str | None = None
    """Why it is lost, if its process has not ended by itself."""
    decoders: Mapping[int, codecs.IncrementalDecoder] = field(
        default_factory=lambda: {number: codecs.getincrementaldecoder("utf-8")("replace") for number in (1, 2)}
    )


class RayRanks:
    """The processes of all ranks. After `end`, they can be started again.

    `gpus`: each rank gets a GPU if the cluster has GPUs, where `cluster.ranks.num_gpus` does not say how many. `workers`: the run
    also has rollout workers, which messages name.
    """

    def __init__(self, cluster: ClusterSection, *, gpus: bool, workers: bool) -> None:
        assert cluster.trainers is not None
        self._address, self._count, self._needs = cluster.address, cluster.trainers, cluster.ranks
        self._gpus = gpus and cluster.ranks.num_gpus is None
        self._workers = f"{cluster.workers.count} x ({ray_api.needs_text(cluster.workers)})" if workers else ""
        self._ranks: list[_Rank] = []
        self._connected = False
        self._group: Any = None
        """What Ray has reserved."""

    def start(self, words: Sequence[str]) -> None:
        """Reserve the resources of all ranks, and start their processes. Raises ConfigError or EngineError."""
        if (
            not self._connected
        ):  # a second start uses the connection of the first, and the directories that it has copied
            ray_api.connect(self._address, self._needs)
            self._connected = True
        deadline = time.monotonic() + self._needs.start_timeout
        needs = self._needs
        if self._gpus and ray_api.has_gpus():
            needs = needs.model_copy(update={"num_gpus": 1})
        self._ranks = []
        self._reserve(needs, deadline)
        self._ranks = [_Rank(ray_api.create_rank(rank, needs, self._group)) for rank in range(self._count)]
        directory = None if "working_dir" in needs.runtime_env else os.getcwd()
        stores = self._call_all([rank.actor.prepare.remote(directory) for rank in self._ranks], deadline)
        commands = [self._command(number, words, *stores[0]) for number in range(len(self._ranks))]
        places = self._call_all(
            [rank.actor.start.remote(command) for rank, command in zip(self._ranks, commands, strict=True)], deadline
        )
        for rank, place in zip(self._ranks, places, strict=True):
            rank.place = place
            rank.ended, rank.output = rank.actor.wait.remote(), rank.actor.read.remote()
        _say("trainer ranks: " + "; ".join(f"rank {number} on {place}" for number, place in enumerate(places)))

    def poll(self, seconds: float) -> list[int | None]:
        """Wait until a rank has ended or written output, at most `seconds`. Returns the exit status of each rank; None for a rank
        that runs."""
        found = ray_api.ready([reference for rank in self._ranks for reference in _references(rank)], seconds)
        for rank in self._ranks:
            if rank.output in found:
                self._write_output(rank)
            if rank.ended in found:
                self._note_end(rank)
        return [rank.status for rank in self._ranks]

    def place(self, rank: int) -> str:
        """The machine and the process of a rank, for messages."""
        return self._ranks[rank].place

    def reason(self, rank: int) -> str | None:
        """Why a rank is lost whose process has not ended by itself."""
        return self._ranks[rank].reason

    def send_signal(self, number: int) -> None:
        """Send rank 0 a signal. The other ranks end with it."""
        self._ranks[0].actor.send_signal.remote(number)

    def end(self) -> None:
        """End all processes, and give their resources back."""
        stopping = [rank.actor.stop.remote() for rank in self._ranks if rank.reason is None]
        ray_api.ready(stopping, _DRAIN, count=len(stopping))
        for rank in self._ranks:
            ray_api.kill(rank.actor)
        if self._group is not None:
            ray_api.release(self._group)
        self._group = None

    def close(self) -> None:
        """End the connection with Ray."""
        ray_api.disconnect()
        self._connected = False

    def _reserve(self, needs: RanksSection, deadline: float) -> None:
        """Reserve the resources of all ranks. Raises ConfigError if the cluster does not have them in time."""
        needed = f"{self._count} trainer ranks need {ray_api.needs_text(needs)} each"
        with_workers = f"; the run's rollout workers need {self._workers} besides" if self._workers else ""
        self._group = ray_api.reserve([needs] * self._count)
        noticed = time.monotonic() + _NOTICE
        while not ray_api.reserved(self._group, _WAIT):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the Ray cluster did not have the resources of the ranks after cluster.ranks.start_timeout="
                    f"{self._needs.start_timeout:g} s: {needed}, and the cluster has free: {ray_api.free_resources()}"
                    f"{with_workers}. Add machines, or set a smaller cluster.trainers or cluster.ranks"
                )
            if time.monotonic() > noticed:
                _say(f"waiting for the Ray cluster: {needed}; free: {ray_api.free_resources()}{with_workers}")
                noticed = math.inf

    def _call_all(self, references: Sequence[Any], deadline: float) -> list[Any]:
        """The results of one call to each rank. Raises EngineError or ConfigError."""
        missing = list(references)
        while missing:
            for reference in ray_api.ready(missing, _WAIT):
                missing.remove(reference)
                number = references.index(reference)
                try:
                    ray_api.result(reference)
                except WorkerLost as error:
                    raise EngineError(f"trainer rank {number} was lost at its start: {error}") from error
            if missing and time.monotonic() > deadline:
                numbers = [references.index(reference) for reference in missing]
                raise EngineError(
                    f"the processes of the trainer ranks {numbers} have not started within cluster.ranks.start_timeout="
                    f"{self._needs.start_timeout:g} s: look into Ray's logs on their machines"
                )
        return [ray_api.result(reference) for reference in references]

    def _command(self, rank: int, words: Sequence[str], host: str, port: int) -> RankStart:
        forwarded = {
            name: value for name, value in os.environ.items() if name in _FORWARDED or name.startswith("TURNWISE_")
        }
        numbers = {
            **{"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1},  # each rank sees its own GPU only
            **{"WORLD_SIZE": self._count, "MASTER_PORT": port},
        }
        environment = {
            **forwarded,
            **{name: str(number) for name, number in numbers.items()},
            "MASTER_ADDR": host,
            "TURNWISE_STORE_PORT": str(port),
        }
        return RankStart(words=list(words), environment=environment, terminals=_terminals() if rank == 0 else {})

    def _write_output(self, rank: _Rank) -> None:
        """Write the output that has arrived, and ask for the next."""
        try:
            found = ray_api.result(rank.output)
        except EngineError:  # the reason arrives with the status
            rank.output = None
            return
        for number, data in found:
            stream: TextIO = sys.stdout if number == 1 else sys.stderr
            stream.write(rank.decoders[number].decode(data))
            stream.flush()
        rank.output = rank.actor.read.remote() if found else None

    def _note_end(self, rank: _Rank) -> None:
        try:
            rank.status = ray_api.result(rank.ended)
        except EngineError as error:
            rank.status, rank.reason, rank.output = _LOST, f"was lost: {error}", None
        rank.ended = None
        self._drain(rank)

    def _drain(self, rank: _Rank) -> None:
        """Write the last output of a rank that has ended. Its children may keep the stream open."""
        deadline = time.monotonic() + _DRAIN
        while rank.output is not None and ray_api.ready([rank.output], max(deadline - time.monotonic(), 0.0)):
            self._write_output(rank)
        rank.output = None


def _references(rank: _Rank) -> list[Any]:
    return [reference for reference in (rank.ended, rank.output) if reference is not None]


def _terminals() -> dict[int, tuple[int, int]]:
    """The streams of this process that are terminals, with their sizes in lines and columns."""
    found: dict[int, tuple[int, int]] = {}
    for number in (1, 2):
        if os.isatty(number):
            size = os.get_terminal_size(number)
            found[number] = (size.lines, size.columns)
    return found


def _say(text: str) -> None:
    print(f"turnwise: {text}", flush=True)
