"""What the rollout server and its client send each other: requests, trajectories as server-sent events, images and adapters.

A trajectory has the form of the record (docs/record.md). Beside it stand the completions of its turns, which are not part of
the record: with the sampled tokens where the segments do not contain all of them, because the environment cut or excluded
some.

Each image is sent once in each direction, as a PNG file under the hash of its pixels (`data.images.digest`). Messages refer to
it by `sha256:<hash>`, as in the record. PNG keeps all pixels, and client and server have the same image processor, so the
trainer computes the same tensors for the model as the server did. The tensors themselves are not sent.

An adapter is one file, sent in the same way as all weights: the weights as a safetensors file, with adapter_config.json in its
metadata. `differences` names the options of a recipe that server and trainer must have in common and do not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from turnwise.chat.media import MediaProcessor
from turnwise.data.images import digest, is_image, load_image, media_kind, media_value
from turnwise.data.rows import COLUMNS
from turnwise.errors import DataError, EngineError, RunError, TurnwiseError
from turnwise.options.environment_values import same_value, with_digests
from turnwise.options.schema import Config
from turnwise.record.trajectory_json import MediaStore, StoredImage, decode_trajectory, encode_line, trajectory_record
from turnwise.types import Completion, LogprobKind, Media, Message, Row, Sampling, Segment, Trajectory, Turn

# images

MAX_BODY = 256 << 20
"""Bytes of a request with conversations and their images, at most."""
_REFERENCE = re.compile(r"sha256:([0-9a-f]{64})")
_TENSORS = "multi_modal_inputs"


def processor_fingerprint(vision: MediaProcessor | None) -> str | None:
    """SHA-256 of the kind and the files of a model's image processor; None for a text model."""
    if vision is None:
        return None
    hashed = hashlib.sha256(type(getattr(vision.processor, "image_processor", None)).__name__.encode())
    for file in sorted(vision.files, key=lambda file: file.name):
        content = file.read_bytes()
        hashed.update(f"{file.name}:{len(content)}:".encode() + content)
    return hashed.hexdigest()


@dataclass(slots=True)
class PackedRows:
    """The client's rows as JSON values, and their images."""

    images: dict[str, bytes] = field(default_factory=dict)
    """PNG files by the hash of their pixels."""
    given: dict[int, dict[str, Any]] = field(default_factory=dict)
    """For each row (by `id(row)`): its images as the row has them, such as a path, by the same hash."""

    def pack(self, row: Row) -> tuple[list[Message], dict[str, Any]]:
        """The messages and the fields of a row, with references in place of images.

        Raises EngineError if an image cannot be read, a video is a file, or the images are too large for a request.
        """
        where, given = f"row {row.id}", self.given.setdefault(id(row), {})
        try:
            messages = with_changed_media(row.messages, lambda value: self._reference(value, given, where))
            fields = {name: value for name, value in row.fields.items() if name != _TENSORS}
            for column in COLUMNS.values():
                if isinstance(values := fields.get(column), list | tuple):
                    fields[column] = [
                        change_each(value, lambda item: self._reference(item, given, where)) for value in values
                    ]
        except DataError as error:
            raise EngineError(f"{error}. A rollout server cannot run this row") from error
        size = sum(map(len, self.images.values())) * 4 // 3
        if size > MAX_BODY:
            raise EngineError(
                f"the images of a request have {size >> 20} MiB, and a rollout server takes {MAX_BODY >> 20} MiB: make the "
                f"images smaller, or, with deterministic=true, train.batch_size"
            )
        return messages, fields

    def _reference(self, value: Any, given: dict[str, Any], where: str) -> str:
        image = load_image(value, where=f"an image of {where}")
        name = digest(image)
        given.setdefault(name, value)
        if name not in self.images:
            self.images[name] = _png(image)
        return f"sha256:{name}"


def unpack_row(
    messages: Sequence[Message], fields: Mapping[str, Any], images: Mapping[str, str]
) -> tuple[list[Message], dict[str, Any]]:
    """The messages and the fields of a row, with PNG files (bytes) in place of references to `images`, which are in base64.

    Images in messages may also be data URIs. Raises EngineError for paths and unknown references.
    """

    def opened(value: Any) -> Any:
        if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)) is not None:
            return _decoded(images, match.group(1))
        if isinstance(value, str) and value.startswith("data:image/"):
            return value
        raise EngineError(
            f"an image of a message is {value!r:.80}: it must be sha256:<hash> of an image in `images`, or a data URI. The "
            f"server opens no files or addresses for its clients"
        )

    unpacked = dict(fields)
    for column in COLUMNS.values():
        if isinstance(values := unpacked.get(column), list):
            unpacked[column] = [change_each(value, opened) if _is_reference(value) else value for value in values]
    return with_changed_media(messages, opened), unpacked


class CollectedImages(MediaStore):
    """Collects the images of a trajectory instead of writing them. Images in `known`, which the client has, are left out."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__(None)
        self.files: dict[str, str] = {}
        """PNG files in base64, by the hash of their pixels."""
        self._known = known

    def keep(self, image: Any, name: str) -> None:
        if name not in self._known and name not in self.files:
            self.files[name] = encoded_png(image)

    def label(self, media: Media) -> dict[str, Any]:
        for frame in media.source if isinstance(media.source, list) else [media.source]:
            if is_image(frame):  # an environment may have given it as a path of the server
                self.keep(frame, digest(frame))
        return super().label(media)


def processed_again(item: Media, segment: Segment, vision: MediaProcessor | None, *, where: str) -> Media:
    """An image or a video that another process has put into a segment, with the tensors of this process's image processor.

    `item.source` are the pixels: PIL images, or files as bytes. Equal images share their tensors. Raises EngineError if the
    processor makes another number of placeholders than the segment has.
    """
    if vision is None:
        raise EngineError(f"{where} contains images, and the model of the trainer has no image processor")
    try:
        processed = vision.process(item.kind, item.source)
    except TurnwiseError as error:
        raise EngineError(f"{where}: {error}") from error
    tokens = segment.token_ids[item.start : item.start + item.length]
    if tokens.count(vision.token_ids[item.kind]) != processed.num_placeholders:
        raise EngineError(
            f"{where}: the {item.kind} at token {item.start} has {item.length} tokens, and the trainer's image processor makes "
            f"{processed.num_placeholders} placeholders of it: install the same version of transformers"
        )
    return replace(item, source=processed.source, inputs=processed.inputs)


class ReceivedImages:
    """The images of a trajectory from the server. `given` are those of its row, `files` those of the answer.

    Raises EngineError if `files` has another form.
    """

    def __init__(self, vision: MediaProcessor | None, given: Mapping[str, Any], files: Any, *, where: str) -> None:
        if not isinstance(files, Mapping):
            raise EngineError(f"{where}: `images` must be an object of PNG files in base64")
        self._vision, self._given, self._files, self._where = vision, given, files, where

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with images in place of references: as the client's row has them, else PIL images."""
        return with_changed_media(messages, lambda value: self._image(value) if _is_reference(value) else value)

    def media(self, item: Media, segment: Segment) -> Media:
        """An image or a video of a segment, with the tensors for the model. Raises EngineError."""
        frames: list[StoredImage] = item.source if isinstance(item.source, list) else [item.source]
        images = [self._image(f"sha256:{frame.sha256}") for frame in frames]
        value = images if isinstance(item.source, list) else images[0]
        return processed_again(replace(item, source=value), segment, self._vision, where=self._where)

    def _image(self, reference: str) -> Any:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise EngineError(
                f"{self._where} contains the video file {reference[7:87]!r}: environments must give frames"
            )
        name = match.group(1)
        if name in self._given:
            return self._given[name]
        try:
            return load_image(_decoded(self._files, name), where=f"{self._where}: the image {name[:12]}")
        except DataError as error:
            raise EngineError(str(error)) from error


def with_changed_media(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """The messages with `change` applied to each image, and to each frame of a video."""
    result: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, Mapping) and media_kind(part) for part in content):
            message = {**message, "content": [_changed_part(part, change) for part in content]}
        result.append(message)
    return result


def _changed_part(part: Any, change: Callable[[Any], Any]) -> Any:
    kind = media_kind(part) if isinstance(part, Mapping) else None
    return part if kind is None else {"type": kind, kind: change_each(media_value(part), change)}


def change_each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of an image, or of each frame of a video."""
    return [change(frame) for frame in value] if isinstance(value, list | tuple) else change(value)


def _is_reference(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_reference, value))
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def _decoded(images: Mapping[str, Any], name: str) -> bytes:
    """A file of `images`. Raises EngineError if there is none, or if it is not base64."""
    try:
        return base64.b64decode(images[name], validate=True)
    except KeyError:
        raise EngineError(f"there is no image sha256:{name} in `images`") from None
    except (binascii.Error, ValueError, TypeError):
        raise EngineError(f"the image sha256:{name} is not base64") from None


def encoded_png(image: Any) -> str:
    """A PIL image as a PNG file in base64."""
    return base64.b64encode(_png(image)).decode()


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# requests and trajectories


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

    def written(each: Trajectory, id: str) -> dict[str, Any]:
        record = {**trajectory_record(each, media=images, exact_logprobs=True), "id": id}
        return {"trajectory": record, "completions": [_completion_record(turn, each) for turn in each.turns]}

    event = written(trajectory, id)
    if trajectory.agents:  # their ids begin with that of the conversation that opened them
        event["agents"] = [written(agent, f"{id}{agent.id[len(trajectory.id) :]}") for agent in trajectory.agents]
    if images.files:
        event["images"] = images.files
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
    sent: float,
    packed: PackedRows | None = None,
    vision: MediaProcessor | None = None,
) -> None:
    """Fill an empty trajectory from a parsed line of the server. Its id, row, seed and group stay.

    `sent` is when it was asked for; `packed` are the images of the request, `vision` is the image processor of the trainer's
    model.

    Raises EngineError if the line is not a trajectory, or if its images cannot be used.
    """
    given = {} if packed is None else packed.given[id(trajectory.row)]
    images = ReceivedImages(vision, given, value.get("images", {}), where=where)
    done, agents = _received(value, images, where=where), value.get("agents", [])
    if not isinstance(agents, list) or not all(isinstance(agent, dict) for agent in agents):
        raise EngineError(f"{where}: `agents` must be a list of trajectories with their completions")
    done.agents = [_received(agent, images, where=where) for agent in agents]
    take_over(trajectory, done, sent=sent)


def _received(value: Mapping[str, Any], images: ReceivedImages, *, where: str) -> Trajectory:
    """A trajectory that the server has sent, with its completions. Raises EngineError."""
    try:
        done = decode_trajectory(value.get("trajectory"), where=where)
    except RunError as error:
        raise EngineError(f"the rollout server sent a trajectory that cannot be read: {error}") from None
    completions = value.get("completions")
    if not isinstance(completions, list) or len(completions) != len(done.turns):
        raise EngineError(f"{where}: `completions` must have an entry for each of the {len(done.turns)} turns")
    for turn, completion in zip(done.turns, completions, strict=True):
        turn.completion = None if completion is None else _completion(completion, turn, done, where)
    done.messages = images.messages(done.messages)
    done.previous_histories = [images.messages(history) for history in done.previous_histories]
    for segment in done.segments:
        segment.media = [images.media(item, segment) for item in segment.media]
    _share_messages(done)
    return done


def take_over(trajectory: Trajectory, done: Trajectory, *, sent: float) -> None:
    """Give an empty trajectory what the conversation of `done` has left, which was asked for at the time `sent`. Its id, row,
    seed and group stay."""
    _on_this_clock(done, sent, time.time())
    for agent in done.agents:
        agent.row, agent.episode = trajectory.row, trajectory.id
    trajectory.agents = done.agents
    trajectory.messages, trajectory.previous_histories = done.messages, done.previous_histories
    trajectory.tools, trajectory.turns, trajectory.segments = done.tools, done.turns, done.segments
    trajectory.stop, trajectory.error = done.stop, done.error
    trajectory.metrics, trajectory.escaped = done.metrics, done.escaped
    trajectory.logprob_kind, trajectory.template_mismatch = done.logprob_kind, done.template_mismatch
    trajectory.started, trajectory.seconds = done.started, done.seconds


def _on_this_clock(done: Trajectory, sent: float, received: float) -> None:
    """Move the times of a conversation on a machine with another clock, so that it began when it was asked for at the earliest,
    or else ended now at the latest."""
    if done.started is None:
        return
    moved = max(0.0, sent - done.started) or min(0.0, received - done.started - done.seconds)
    for each in (done, *done.agents):
        each.started = None if each.started is None else each.started + moved
        for turn in each.turns:
            turn.started = None if turn.started is None else turn.started + moved


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


# options in common

_SECTIONS = (
    "environment",
    "tools",
    "mcp",
    "tool_calls",
    "limits",
    "policies",
    "thinking",
    "tokenization_sanity_check",
    "tool_format",
    "deterministic",
)

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


def served_options(config: Config) -> dict[str, Any]:
    """The options that decide about conversations, as plain data by their dotted names.

    The sampling is not among them, but for the form of answers: the trainer sends it with each request. The engine is the
    server's own.
    """
    plain = with_digests(config.model_dump(mode="json"), config.origins)  # they are sent
    names = [*_SECTIONS, "max_concurrent"] if config.deterministic else _SECTIONS
    of_model = {
        f"model.{name}": plain["model"][name]
        for name in ("lora", "quantization", "chat_template_kwargs", "router_replay")
    }
    single = {
        "data.escape_control_tokens": plain["data"]["escape_control_tokens"],
        "sampling.response_format": plain["sampling"]["response_format"],
    }
    return dict(_flat({**{name: plain[name] for name in names}, **of_model, **single}, ""))


def base_weights(config: Config) -> str | None:
    """A fingerprint of the model's files, if the recipe trains an adapter on it: then only the adapter is sent. Else None.

    Of each file, the size and blocks in equal distances are read, so that large models are no obstacle. For a model on the hub,
    its name.
    """
    if config.model.lora.rank is None:
        return None
    folder = Path(config.model.path).expanduser()
    files = sorted(file for suffix in ("safetensors", "bin") for file in folder.glob(f"*.{suffix}"))
    if not files:
        return config.model.path
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            for block in range(_BLOCKS):
                opened.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in ("arguments", "model.chat_template_kwargs"):
            items += _flat(value, f"{key}.")
        else:
            items.append((key, value))
    return items


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A line for each option that has another value at the server (`theirs`) than at the trainer (`ours`)."""
    return [
        f"{name}={ours.get(name)!r:.80} here, {theirs.get(name)!r:.80} at the server"
        for name in sorted({*ours, *theirs})
        if not same_value(ours.get(name), theirs.get(name))
    ]


# adapters

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_KEY = "adapter_config"

LoadAdapter = Callable[[int, Path], Awaitable[None]]
"""Loads the adapter in a directory into the engine, as the given version. Raises EngineError or ConfigError."""


def pack_adapter(folder: Path, file: Path) -> None:
    """Write the adapter in a directory (in peft's format) into one file. Raises EngineError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    try:
        metadata = {"format": "pt", _KEY: (folder / CONFIG_FILE).read_text(encoding="utf-8")}
        save_file(load_file(folder / WEIGHTS_FILE), file, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the adapter cannot be written to {file}: {error}") from error


def packed_config(file: Path) -> str | None:
    """The adapter_config.json of a packed adapter; None if the file has weights that are no adapter.

    Raises OSError or SafetensorError if the file cannot be read.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(_KEY)


def unpack_adapter(file: Path, config: str, folder: Path) -> None:
    """Write a packed adapter into a directory, in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(config, encoding="utf-8")
    (folder / WEIGHTS_FILE).write_bytes(file.read_bytes())
