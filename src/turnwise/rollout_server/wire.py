"""What the rollout server and its client send each other: requests, and finished trajectories as server-sent events.

A trajectory has the form of the record (docs/record.md). Beside it stand the completions of its turns, which are not part of the
record: with the sampled tokens where the segments do not contain all of them, because the environment cut or excluded some.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from turnwise.chat.media import MediaProcessor
from turnwise.errors import EngineError, RunError
from turnwise.record.decode import decode_trajectory
from turnwise.record.encode import encode_line, trajectory_record
from turnwise.rollout_server.images import CollectedImages, PackedRows, ReceivedImages, unpack_row
from turnwise.types import Completion, LogprobKind, Message, Row, Sampling, Trajectory, Turn

__all__ = [
    "ConversationBody",
    "LeaseBody",
    "LeaseIdBody",
    "RolloutBody",
    "RowBody",
    "SamplingBody",
    "WeightsPathBody",
    "empty_trajectory",
    "fill_trajectory",
    "finished_event",
    "request_body",
    "take_over",
    "with_images",
]


class _Body(BaseModel):
    """The JSON body of a request. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RowBody(_Body):
    """The row that a conversation starts from."""

    id: str
    """The id of the row."""
    messages: list[dict[str, Any]] = Field(min_length=1)
    """The opening messages in the OpenAI format. The value of an image is `sha256:<hash>` of an image in `images` of the request,
    or a data URI; a video is a list of such values."""
    fields: dict[str, Any] = {}
    """The other columns of the row."""
    source: str = ""
    """The data set that the row is from; empty if there is only one."""


class ConversationBody(_Body):
    """One conversation to run."""

    id: str
    """The id of the trajectory; unique in the request."""
    group: str = ""
    """The id of the trajectory's group."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The seed of the conversation's random numbers."""
    row: RowBody
    """Where the conversation starts."""


class SamplingBody(_Body):
    """How tokens are sampled; the numbers of tokens are set by the server's recipe."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The sampling temperature; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the most likely tokens up to this total probability are sampled; 1: all."""
    top_k: int = Field(default=0, ge=0)
    """Only this number of the most likely tokens are sampled; 0: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Only tokens with at least this share of the most likely token's probability are sampled; 0: all."""
    stop: list[str] = []
    """Texts that end a turn."""

    def to_sampling(self) -> Sampling:
        """The same as `Sampling`."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, stop=tuple(self.stop)
        )


class RolloutBody(_Body):
    """The body of `POST /rollouts`."""

    conversations: list[ConversationBody] = Field(min_length=1)
    """The conversations to run."""
    sampling: SamplingBody | None = None
    """How tokens are sampled; null: as the server's recipe says."""
    least_version: int | None = None
    """The request is refused if the server's weights are older than this version; null: any weights."""
    lease: str | None = None
    """The trainer's lease, which the request renews; null for clients that change no weights."""
    images: dict[str, str] = {}
    """The images of the conversations: PNG files in base64, each under the SHA-256 of its mode, size and pixels."""


class LeaseBody(_Body):
    """The body of `POST /lease`."""

    owner: str = Field(min_length=1, max_length=1000)
    """The name of the trainer. The same name may take its own lease again, for example after a restart."""


class LeaseIdBody(_Body):
    """The body of `POST /lease/renew` and `POST /lease/release`."""

    lease: str
    """The id of the lease, from `POST /lease`."""


class WeightsPathBody(_Body):
    """The JSON body of `POST /weights`: weights in a file that the server can read."""

    version: int = Field(ge=0, lt=1 << 31)
    """The version of the weights."""
    path: str = Field(min_length=1)
    """The absolute path of a safetensors file, on a disk or in shared memory."""
    lease: str
    """The trainer's lease, from `POST /lease`."""
    checksum: str | None = None
    """CRC-32 of the file, as 8 hexadecimal digits; null: the file is not checked."""


def request_body(
    trajectories: Sequence[Trajectory], sampling: Sampling, *, least_version: int | None, lease: str | None
) -> tuple[dict[str, Any], PackedRows]:
    """The body of `POST /rollouts` for empty trajectories, and their images. Values of rows without a JSON type become texts.

    Raises EngineError if an image cannot be sent.
    """
    packed = PackedRows()
    rows = {id(trajectory.row): trajectory.row for trajectory in trajectories}  # a group shares its row
    of_rows = {key: packed.pack(row) for key, row in rows.items()}
    body = {
        "conversations": [
            {
                "id": trajectory.id,
                "group": trajectory.group,
                "seed": trajectory.seed,
                "row": {
                    "id": trajectory.row.id,
                    "messages": messages,
                    "fields": fields,
                    "source": trajectory.row.source,
                },
            }
            for trajectory in trajectories
            for messages, fields in [of_rows[id(trajectory.row)]]
        ],
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
        },
        "least_version": least_version,
        "lease": lease,
    }
    plain = json.loads(encode_line(body))
    if packed.images:
        plain["images"] = {name: base64.b64encode(file).decode() for name, file in packed.images.items()}
    return plain, packed


def with_images(body: RolloutBody) -> list[ConversationBody]:
    """The conversations of a request, with the images in place of the references to them. Raises EngineError."""
    conversations: list[ConversationBody] = []
    for conversation in body.conversations:
        messages, fields = unpack_row(conversation.row.messages, conversation.row.fields, body.images)
        row = conversation.row.model_copy(update={"messages": messages, "fields": fields})
        conversations.append(conversation.model_copy(update={"row": row}))
    return conversations


def empty_trajectory(body: ConversationBody, *, prefix: str) -> Trajectory:
    """The trajectory that a conversation fills. `prefix` keeps the ids of several clients apart."""
    row = Row(id=body.row.id, messages=body.row.messages, fields=body.row.fields, source=body.row.source)
    return Trajectory(id=f"{prefix}{body.id}", group=body.group, row=row, seed=body.seed)


def finished_event(trajectory: Trajectory, *, id: str, known_images: Collection[str] = ()) -> bytes:
    """A finished trajectory as a server-sent event; `id` is the client's id of it, `known_images` are those of its request."""
    images = CollectedImages(known_images)
    record = {**trajectory_record(trajectory, media=images, exact_logprobs=True), "id": id}
    completions = [_completion_record(turn, trajectory) for turn in trajectory.turns]
    event = {"trajectory": record, "completions": completions, **({"images": images.files} if images.files else {})}
    return b"data: " + encode_line(event, separators=(",", ":")) + b"\n"


def _completion_record(turn: Turn, trajectory: Trajectory) -> dict[str, Any] | None:
    """The completion of a turn, without the tokens if the segments contain the same tokens; None if there is none."""
    completion = turn.completion
    if completion is None:
        return None
    record: dict[str, Any] = {
        "finish_reason": completion.finish_reason,
        "logprob_kind": completion.logprob_kind,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    if list(_sampled_columns(turn, trajectory)[0]) != list(completion.token_ids):
        record["token_ids"] = list(completion.token_ids)
        record["logprobs"] = list(completion.logprobs)
        record["versions"] = list(completion.versions)
    return record


def _sampled_columns(turn: Turn, trajectory: Trajectory) -> tuple[list[int], list[float], list[int]]:
    """Token ids, log-probabilities and versions of a turn's tokens in the segments."""
    ids, logprobs, versions = list[int](), list[float](), list[int]()
    for segment in trajectory.segments:
        for position, sampled_in in enumerate(segment.turn):
            if sampled_in == turn.index:
                ids.append(segment.token_ids[position])
                logprobs.append(segment.logprobs[position])
                versions.append(segment.version[position])
    return ids, logprobs, versions


def fill_trajectory(
    trajectory: Trajectory,
    value: Mapping[str, Any],
    *,
    where: str,
    packed: PackedRows | None = None,
    vision: MediaProcessor | None = None,
) -> None:
    """Fill an empty trajectory from a parsed line of the server. Its id, row, seed and group stay.

    `packed` are the images of the request, `vision` is the image processor of the trainer's model.

    Raises EngineError if the line is not a trajectory, or if its images cannot be used.
    """
    try:
        done = decode_trajectory(value.get("trajectory"), where=where)
    except RunError as error:
        raise EngineError(f"the rollout server sent a trajectory that cannot be read: {error}") from None
    completions = value.get("completions")
    if not isinstance(completions, list) or len(completions) != len(done.turns):
        raise EngineError(f"{where}: `completions` must have an entry for each of the {len(done.turns)} turns")
    for turn, completion in zip(done.turns, completions, strict=True):
        turn.completion = None if completion is None else _completion(completion, turn, done, where)
    given = {} if packed is None else packed.given[id(trajectory.row)]
    images = ReceivedImages(vision, given, value.get("images", {}), where=where)
    done.messages = images.messages(done.messages)
    done.previous_histories = [images.messages(history) for history in done.previous_histories]
    for segment in done.segments:
        segment.media = [images.media(item, segment) for item in segment.media]
    take_over(trajectory, done)
    _share_messages(trajectory)


def take_over(trajectory: Trajectory, done: Trajectory) -> None:
    """Give an empty trajectory what the conversation of `done` has left. Its id, row, seed and group stay."""
    trajectory.messages, trajectory.previous_histories = done.messages, done.previous_histories
    trajectory.tools, trajectory.turns, trajectory.segments = done.tools, done.turns, done.segments
    trajectory.stop, trajectory.error = done.stop, done.error
    trajectory.metrics = done.metrics
    trajectory.logprob_kind, trajectory.template_mismatch = done.logprob_kind, done.template_mismatch
    trajectory.started, trajectory.seconds = done.started, done.seconds


def _completion(value: Any, turn: Turn, trajectory: Trajectory, where: str) -> Completion:
    """The completion of a turn. Raises EngineError."""
    try:
        ids, logprobs, versions = _sampled_columns(turn, trajectory)
        if "token_ids" in value:
            ids = array("i", value["token_ids"]).tolist()
            logprobs = array("d", value["logprobs"]).tolist()
            versions = array("i", value["versions"]).tolist()
        finish_reason: Literal["stop", "length"] = "length" if value["finish_reason"] == "length" else "stop"
        completion = Completion(
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=finish_reason,
            logprob_kind=LogprobKind(value["logprob_kind"]),
            prompt_tokens=value["prompt_tokens"],
            cached_tokens=value["cached_tokens"],
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{where}: a completion cannot be read: {type(error).__name__}: {error}") from None
    if not len(ids) == len(logprobs) == len(versions):
        raise EngineError(f"{where}: the columns of a completion must have equal lengths")
    return completion


def _share_messages(trajectory: Trajectory) -> None:
    """Make the message of a turn and the same message in the histories one object, as the rollout loop does."""
    histories: list[list[Message]] = [*trajectory.previous_histories, trajectory.messages]
    for turn in trajectory.turns:
        place = turn.message_index
        if place is None:
            continue
        for history in histories[turn.history :]:
            if place < len(history) and history[place] == turn.message:
                history[place] = turn.message
