"""The trainer's side of a rollout server: conversations run on the server, and the server gets the trainer's weights.

`RolloutClient` is a `ConversationRunner`: the server samples, and fills trajectories. If the server is lost, a conversation is
sent again; a server that was restarted gets the last weights again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import WeightPublisher, WeightSource, WriteAdapter
from turnwise.engines.remote.http import Failures, HttpLimits, HttpServer, ServerFailed, ServerLost, ServerRefused
from turnwise.engines.remote.weights import WeightFiles, WeightUpdate, checksum_of
from turnwise.errors import ConfigError, EngineError
from turnwise.options.engines import RolloutServerSection
from turnwise.rollout.context import ConversationContext, Runner
from turnwise.rollout_server.wire import differences, fill_trajectory, pack_adapter, processor_fingerprint, request_body
from turnwise.types import Failure, Sampling, Trajectory

_ATTEMPTS = 3
"""How often a conversation is sent to a server that is lost in mid-conversation."""
_BUSY_SECONDS = 0.5
"""The pause after an answer that the server's queue is full."""
_RENEWALS = 4
"""How often a lease is renewed in the time that it lasts."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerIdentity:
    """Who asks a rollout server, and what its conversations must be the same as."""

    name: str
    """See `trainer_name`."""
    tokenizer: str
    """The fingerprint of the trainer's tokenizer."""
    recipe: Mapping[str, Any]
    """The trainer's `served_options`."""
    base: str | None = None
    """The fingerprint of the weights below the trained adapter; None if all weights are trained."""
    vision: MediaProcessor | None = None
    """The image processor of the trainer's model."""


def trainer_name(output: str) -> str:
    """The name of the run in the directory `output` on this machine. A run that is resumed has the same name."""
    return f"{socket.gethostname()}:{os.path.abspath(output)}"


class RolloutClient:
    """A rollout server as the trainer sees it. One object serves one event loop at a time."""

    def __init__(self, url: str, options: RolloutServerSection, *, token: str | None, trainer: TrainerIdentity) -> None:
        self.url, self.options, self.trainer = url, options, trainer
        self.version = -1
        """The version of the weights that the server has; -1 before the first weights were sent."""
        limits = HttpLimits(answer=options.timeout, idle=options.timeout)
        hint = f"set the environment variable {options.token_env} to the token of the rollout server"
        self._server = HttpServer(url, token=token, limits=limits, token_hint=hint)
        self._files = WeightFiles(None if options.weights_directory is None else Path(options.weights_directory))
        self._lease: str | None = None
        self._instance: str | None = None
        """The start of the server that has the lease and the weights."""
        self._sent: WeightUpdate | None = None
        """The weights that the server has."""
        self._connecting = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Compare the server's recipe with the trainer's. Raises ConfigError, also if the server is not there."""
        try:
            info = await self._server.get("/info", timeout=self.options.timeout)
        except EngineError as error:
            raise ConfigError(f"rollout_server.url={self.url}: {error}") from error
        finally:
            await self._server.close()
        self._compare(info)

    @property
    def sampler(self) -> None:
        """The server runs complete conversations and answers no single requests."""
        return None

    async def start(self) -> None:
        """Wait until the server answers. Raises EngineError if it does not, ConfigError if its recipe differs."""
        self._compare(await self._wait_for_server())

    async def load_weights(self, version: int, weights: Mapping[str, Any] | WriteAdapter | None = None) -> None:
        """Send weights to the server: all weights, or an adapter (a function that writes its files into a directory).

        After a failed update the server goes on with its old weights. Raises EngineError.
        """
        if weights is None:
            raise EngineError("a rollout server has its own copy of the weights: give the weights")
        await self._take_lease()
        update = await asyncio.to_thread(self._write, version, weights)
        unused: WeightUpdate | None = update
        try:
            await self._send(update)
            unused, self._sent, self.version = self._sent, update, version
        finally:
            if unused is not None:
                self._files.discard(unused)

    def _write(self, version: int, weights: Mapping[str, Any] | WriteAdapter) -> WeightUpdate:
        """A file with the weights. Raises EngineError."""
        if not callable(weights):
            return self._files.write(version, weights)
        update = self._files.write_adapter(version, weights)
        assert update.path is not None  # it was written to a file
        file = update.path.with_suffix(".safetensors")
        try:
            pack_adapter(update.path, file)
        finally:
            self._files.discard(update)
        return replace(update, path=file, adapter=False, checksum=checksum_of(file), size=file.stat().st_size)

    async def close(self) -> None:
        """Give the lease back and remove the files of the weights."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        try:
            if self._lease is not None:
                await self._server.post("/lease/release", {"lease": self._lease}, timeout=5.0)
        except EngineError as error:
            _log.info("the lease of the rollout server was not given back: %s", error)
        finally:
            self._lease = None
            await self._server.close()
            self._files.close()

    def context(self, shared: ConversationContext, renderer: Renderer, thinking: Thinking) -> ConversationContext:
        return replace(shared, make_runner=self.make_runner, runner_supports_lockstep=True)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return ServerWeights(self, learner)

    def metrics(self) -> Mapping[str, int]:
        return {}

    def make_runner(self, context: ConversationContext) -> Runner:
        """The runner of conversations on the server, with the sampling of `context`."""
        if context.lockstep:
            return _BatchRunner(self, context.sampling)
        return _SingleRunner(self, context.sampling)

    async def run(self, trajectories: Sequence[Trajectory], sampling: Sampling) -> None:
        """Let the server fill trajectories. If that fails, the trajectories that are not filled fail with kind `engine`."""
        remaining = {trajectory.id: trajectory for trajectory in trajectories}
        problem = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if attempt > 1:
                    await self._reconnect()
                await self._stream(remaining, sampling)
                return
            except ServerLost as error:
                problem = str(error)
                _log.warning("%s; attempt %d of %d", error, attempt, _ATTEMPTS)
            except (EngineError, ConfigError) as error:
                problem = str(error)
                if not (isinstance(error, ServerRefused) and error.status == 409):
                    break  # 409: the server was restarted and has old weights
        for trajectory in remaining.values():
            trajectory.fail(Failure("engine", problem))

    async def _stream(self, remaining: dict[str, Trajectory], sampling: Sampling) -> None:
        """Ask for conversations until the server has room, and fill them as they finish. Raises EngineError."""
        failures = Failures()
        while remaining:
            trajectories = list(remaining.values())
            make = partial(
                request_body,
                trajectories,
                sampling,
                least_version=None if self._lease is None else self.version,
                lease=self._lease,
            )
            images = any(has_media(trajectory.row.messages) for trajectory in trajectories)
            body, packed = await asyncio.to_thread(make) if images else make()  # encoding images takes time
            sent = time.time()
            try:
                async for event in self._server.events("/rollouts", body):
                    trajectory = remaining.get(_id_of(event))
                    if trajectory is None:
                        raise EngineError(
                            f"the rollout server sent a trajectory {_id_of(event)!r} that was not asked for"
                        )
                    where = f"the answer of {self.url}/rollouts"
                    fill_trajectory(
                        trajectory, event, where=where, sent=sent, packed=packed, vision=self.trainer.vision
                    )
                    del remaining[trajectory.id]
            except ServerFailed as error:
                if error.status == 503:  # the server has no room
                    await asyncio.sleep(_BUSY_SECONDS)
                    continue
                pause = failures.pause(self._server.limits.failing) if error.may_pass else None
                if pause is None:
                    raise
                await asyncio.sleep(pause)
                continue
            if remaining:
                raise ServerLost(f"{self.url}/rollouts ended without {len(remaining)} of the conversations")

    async def _take_lease(self) -> None:
        """Become the trainer that changes the server's weights. Raises EngineError if another trainer uses the server."""
        if self._lease is None:
            answer = await self._server.post("/lease", {"owner": self.trainer.name})
            self._lease, self._instance = answer["lease"], answer["instance"]
            self._renewing = asyncio.get_running_loop().create_task(self._keep_lease(float(answer["seconds"])))

    async def _reconnect(self) -> None:
        """Wait until the server answers. If it was restarted, take the lease and send the weights again.

        Raises EngineError or ConfigError.
        """
        async with self._connecting:
            info = await self._wait_for_server()
            if self._lease is None or (info.get("instance") == self._instance and info.get("version") == self.version):
                return
            self._compare(info)
            answer = await self._server.post("/lease", {"owner": self.trainer.name})
            self._lease, self._instance = answer["lease"], answer["instance"]
            if self._sent is not None and info.get("version") != self.version:
                _log.warning("the rollout server %s has other weights: they are sent again", self.url)
                await self._send_once(self._sent)

    async def _wait_for_server(self) -> Mapping[str, Any]:
        """The server's description, once it answers."""
        try:
            async with asyncio.timeout(self.options.timeout):
                while True:
                    try:
                        return await self._server.get("/info")
                    except (ServerLost, ServerFailed) as error:
                        if isinstance(error, ServerFailed) and not error.may_pass:
                            raise
                        await asyncio.sleep(_BUSY_SECONDS)
        except TimeoutError:
            raise EngineError(
                f"the rollout server {self.url} did not answer for {self.options.timeout:g} s: start it with "
                f"`turnwise serve`, or raise rollout_server.timeout"
            ) from None

    def _compare(self, info: Mapping[str, Any]) -> None:
        """Raise ConfigError if the server's recipe or tokenizer differs from the trainer's."""
        changed = differences(self.trainer.recipe, info.get("options") or {})
        if changed:
            lines = "\n  ".join(changed)
            raise ConfigError(
                f"the rollout server {self.url} runs other conversations than this recipe describes:\n  {lines}\nGive "
                f"the same recipe and the same options to `turnwise serve` and `turnwise train`"
            )
        if info.get("tokenizer") != self.trainer.tokenizer:
            raise ConfigError(
                f"the rollout server {self.url} has another tokenizer or chat template (its model is "
                f"{info.get('model')}): serve the model that is trained"
            )
        if info.get("processor") != processor_fingerprint(self.trainer.vision):
            raise ConfigError(
                f"the model of the rollout server {self.url} ({info.get('model')}) has another image processor than "
                f"model.path here: serve the model that is trained"
            )
        if info.get("base") != self.trainer.base:
            raise ConfigError(
                f"the model of the rollout server {self.url} ({info.get('model')}) has other weights than model.path "
                f"here, and only the adapter (model.lora) is sent: serve the model that is trained"
            )

    async def _send(self, update: WeightUpdate) -> None:
        """Send weights; once more if the server was restarted meanwhile."""
        try:
            await self._send_once(update)
        except (ServerLost, ServerRefused) as error:
            if isinstance(error, ServerRefused) and error.status != 409:
                raise
            await self._reconnect()
            self._lease = (await self._server.post("/lease", {"owner": self.trainer.name}))["lease"]
            await self._send_once(update)

    async def _send_once(self, update: WeightUpdate) -> None:
        lease = self._lease or ""
        assert update.path is not None  # this client broadcasts nothing
        if self.options.weights_directory is not None:
            body = {
                "version": update.version,
                "path": str(update.path.absolute()),
                "lease": lease,
                "checksum": update.checksum,
            }
            await self._server.post("/weights", body)
            return
        query = {"version": str(update.version), "lease": lease, "checksum": update.checksum}
        await self._server.upload("/weights", update.path, query=query)

    async def _keep_lease(self, seconds: float) -> None:
        """Renew the lease, which lasts for `seconds`, until the task is cancelled. If it is lost, the next update takes it."""
        while True:
            await asyncio.sleep(seconds / _RENEWALS)
            try:
                await self._server.post("/lease/renew", {"lease": self._lease}, timeout=10.0)
            except EngineError as error:
                _log.info("the lease of the rollout server was not renewed: %s", error)


class ServerWeights:
    """A `WeightPublisher` that sends the learner's weights to a rollout server."""

    asleep = False

    def __init__(self, client: RolloutClient, learner: WeightSource) -> None:
        self._client = client
        self._learner = learner

    async def begin(self, version: int) -> None:
        await self._client.start()
        await self.publish(version)

    async def before_update(self) -> None:
        pass

    async def publish(self, version: int) -> None:
        learner = self._learner
        await self._client.load_weights(version, learner.save if learner.trains_adapter else learner.weights())


class _SingleRunner:
    """Each conversation is a request of its own: cancelling it ends it on the server."""

    def __init__(self, client: RolloutClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling

    async def __call__(self, trajectory: Trajectory) -> Trajectory:
        await self._client.run([trajectory], self._sampling)
        return trajectory


class _BatchRunner:
    """Conversations that begin in the same run of the event loop are one request, which the server runs in lockstep."""

    def __init__(self, client: RolloutClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling
        self._batch: list[Trajectory] = []
        self._request: asyncio.Task[None] | None = None

    async def __call__(self, trajectory: Trajectory) -> Trajectory:
        self._batch.append(trajectory)
        request = self._request = self._request or asyncio.get_running_loop().create_task(self._run())
        await request  # a cancelled conversation cancels the batch
        return trajectory

    async def _run(self) -> None:
        await asyncio.sleep(0)  # all conversations of the batch have been added after that
        batch, self._batch, self._request = self._batch, [], None
        await self._client.run(batch, self._sampling)


def _id_of(event: Mapping[str, Any]) -> str:
    """The id of the trajectory in an event of the server."""
    trajectory = event.get("trajectory")
    return str(trajectory.get("id")) if isinstance(trajectory, Mapping) else ""
