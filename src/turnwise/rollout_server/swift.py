"""The routes that ms-swift's trainer calls at a `swift rollout` server: conversations, images and weights.

`/infer/` runs conversations. Images are in lists beside the messages, as base64 or as paths that the server can read.

The trainer sends weights by NCCL through vLLM's communicator. It announces each tensor, or each bucket of tensors, in a
request, and then broadcasts it. The broadcasts are received in a thread, in the order of the requests. The tensors wait in the
memory of the CPU until the trainer says that it has sent all of them; then they become the weights of the engine in one
update.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.compat.swift.protocol import RolloutInferRequest, flatten_media, messages_of
from turnwise.compat.swift.rewards import infos_of
from turnwise.data.images import load_image, media_kind, media_value, probe_image
from turnwise.engines.vllm.worker import JoinGroup, SwiftTrainerGroup, TensorPlace, split_tensors
from turnwise.errors import DataError, Failed, boundary
from turnwise.rollout_server.conversations import ConversationQueue, Leases, WeightUpdates
from turnwise.rollout_server.server import EngineLoop, Handler, read_body
from turnwise.rollout_server.wire import MAX_BODY, ConversationBody, RowBody, encoded_png
from turnwise.services.http_server import RequestRefused
from turnwise.types import Message, Sampling, Segment, Trajectory, Turn

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


# images


def with_images(messages: Sequence[Message], images: Any, videos: Any, where: str) -> list[Message]:
    """The messages of a request with its images as parts, at the tags `<image>`.

    Raises RequestRefused if an image cannot be read, or if the numbers of tags and images differ.
    """
    if not images and not videos and not any(isinstance(message.get("content"), list) for message in messages):
        return list(messages)
    if videos:
        raise RequestRefused(400, f"{where}.videos: this server takes images only")
    images = images if isinstance(images, list) else [images]
    opened = [_opened(value, f"{where}.images.{number}") for number, value in enumerate(images)]
    plain = [_opened_parts(message, where) for message in messages]
    try:
        return messages_of(RolloutInferRequest(messages=plain, images=opened))
    except (ValueError, TypeError) as error:
        raise RequestRefused(400, f"{where}: {error}") from None


def encoded_media(shown: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """`images` of `rollout_infos`: the images of the messages in order, as PNG files in base64."""
    return {"images": [encoded_png(load_image(value, where="an image of a message")) for value in shown["image"]]}


def _opened_parts(message: Message, where: str) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        kind = media_kind(part) if isinstance(part, Mapping) else None
        if kind is not None and (value := media_value(part)) is not None:
            part = {"type": kind, kind: _opened(value, f"{where}.messages")}
        parts.append(part)
    return {**message, "content": parts}


def _opened(value: Any, where: str) -> Any:
    """An image as bytes, a data URI or a path. Raises RequestRefused if it is none."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith(("data:", "http://", "https://")) and not _is_file(value):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise RequestRefused(
                400, f"{where} is {value!r:.80}: it must be base64, or the path of a file that this server can read"
            ) from None
    try:
        probe_image(value, where=where)
    except DataError as error:
        raise RequestRefused(400, str(error)) from None
    return value


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and Path(text).is_file()
    except (OSError, ValueError):
        return False


# weights

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class CommunicatorBody(BaseModel):
    """The body of `POST /init_communicator/`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    host: str
    """The address that ms-swift's own server would listen on. Not used: the group listens where the request arrived."""
    port: int = Field(ge=1, le=65535)
    """The port of the group."""
    world_size: int
    """The number of members: this process and the trainer."""


class TensorBody(BaseModel):
    """The body of `POST /update_named_param/`: one tensor."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """The name in the state dict."""
    dtype: str
    """The type, such as `torch.bfloat16`."""
    shape: list[int]
    """The shape."""

    @property
    def type_name(self) -> str:
        """The type without the module."""
        return self.dtype.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.type_name]

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse types and shapes that no weight has."""
        if self.type_name not in _DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}")
        if any(length < 0 for length in self.shape):
            raise ValueError("shape must not have negative numbers")
        return self


class FlattenedTensorBody(TensorBody):
    """A tensor in a bucket of bytes."""

    start_idx: int = Field(ge=0)
    """The first byte of the tensor."""
    end_idx: int
    """The byte after the last."""
    numel: int
    """Bytes of the tensor."""

    @model_validator(mode="after")
    def check_place(self) -> Self:
        """The place must have the size of the tensor."""
        if self.end_idx - self.start_idx != self.size:
            raise ValueError(f"end_idx - start_idx must be the {self.size} bytes of the tensor")
        return self


class BucketBody(BaseModel):
    """The body of `POST /update_flattened_params/`: tensors that are broadcast as one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    metadatas: list[FlattenedTensorBody] = Field(min_length=1)
    """The tensors, in the order of their places."""


class SwiftWeights:
    """The weights of one trainer of ms-swift at a time. All methods are called in the event loop of the engine.

    `join` joins the trainer's group; `longest` is the most bytes of weights.
    """

    def __init__(self, updates: WeightUpdates, leases: Leases, *, join: JoinGroup, longest: int) -> None:
        self._updates = updates
        self._leases = leases
        self._join = join
        self._longest = longest
        self._receiver: _Receiver | None = None

    async def connect(self, host: str, body: CommunicatorBody, trainer: str) -> None:
        """Join the group of a trainer, in the background: the trainer joins after it has the answer.

        `host` is the address at which the group listens. Raises RequestRefused.
        """
        if body.world_size != 2:
            raise RequestRefused(
                400,
                f"world_size={body.world_size} must be 2: the trainer and this process (/get_world_size/ answers 1)",
            )
        self._leases.take(trainer)
        self._end_receiver()
        join, port = self._join, body.port
        self._receiver = _Receiver(lambda: join(host, port), trainer)

    async def announce(self, body: BucketBody | TensorBody) -> None:
        """Receive the broadcast that follows this request. Raises RequestRefused."""
        receiver = self._connected()
        broadcast = _broadcast_of(body)
        size = receiver.announced + broadcast.size
        if size > self._longest:
            raise RequestRefused(413, f"the weights may have {self._longest} bytes, and {size} were announced")
        receiver.announce(broadcast)

    async def load(self) -> dict[str, Any] | None:
        """Load all tensors that were announced since the last call, as the next version; None if there are none.

        Raises RequestRefused: the engine goes on with the old weights.
        """
        if self._receiver is None or not self._receiver.announced:
            return None
        tensors = await self._connected().take()
        return await self._updates.load(self._updates.version + 1, tensors)

    async def disconnect(self) -> None:
        """Leave the group, and let other trainers change the weights."""
        if self._receiver is not None:
            with contextlib.suppress(RequestRefused):  # another trainer has taken the lease
                self._leases.release(self._leases.take(self._receiver.trainer).id)
        self._end_receiver()

    def _connected(self) -> _Receiver:
        """The receiver; the trainer's lease is renewed. Raises RequestRefused."""
        if self._receiver is None:
            raise RequestRefused(409, "the trainer is not connected: send /init_communicator/ first")
        self._leases.take(self._receiver.trainer)
        return self._receiver

    def _end_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """A tensor that the trainer has announced, which contains the weights."""

    places: Sequence[TensorPlace]
    count: int
    dtype: str
    size: int
    """Bytes."""


def _broadcast_of(body: BucketBody | TensorBody) -> _Broadcast:
    """The broadcast that follows a request."""
    if isinstance(body, TensorBody):
        weight = TensorPlace(name=body.name, dtype=body.type_name, shape=body.shape, start=0, end=body.size)
        return _Broadcast([weight], math.prod(body.shape), body.type_name, body.size)
    places = [
        TensorPlace(name=item.name, dtype=item.type_name, shape=item.shape, start=item.start_idx, end=item.end_idx)
        for item in body.metadatas
    ]
    return _Broadcast(places, places[-1].end, "uint8", places[-1].end)


class _Receiver:
    """A thread that receives the broadcasts of one trainer.

    A broadcast blocks until the trainer takes part. The thread is a daemon, so a trainer that has died cannot keep the process.
    """

    def __init__(self, join: Callable[[], SwiftTrainerGroup], trainer: str) -> None:
        self.trainer = trainer
        self.announced = 0
        """Bytes since the last `take`."""
        self._join = join
        self._jobs: queue.SimpleQueue[_Broadcast | Future[dict[str, Any]] | None] = queue.SimpleQueue()
        """Broadcasts in their order; a future receives all tensors since the last future; None ends the thread."""
        self._problem: str | None = None
        """Why a broadcast was not received. No broadcast is received after that."""
        threading.Thread(target=self._run, name="swift-weights", daemon=True).start()

    def announce(self, broadcast: _Broadcast) -> None:
        """Receive a broadcast after those that were announced before. Raises RequestRefused if one of those has failed."""
        self._refuse_after_problem()
        self.announced += broadcast.size
        self._jobs.put(broadcast)

    async def take(self) -> dict[str, Any]:
        """All tensors, once they have arrived. Raises RequestRefused if a broadcast has failed."""
        future: Future[dict[str, Any]] = Future()
        self._jobs.put(future)
        self.announced = 0
        tensors = await asyncio.wrap_future(future)
        self._refuse_after_problem()
        return tensors

    def close(self) -> None:
        """End the thread after the jobs that are left."""
        self._jobs.put(None)

    def _refuse_after_problem(self) -> None:
        if self._problem is not None:
            raise RequestRefused(
                422,
                f"the weights were not received: {self._problem}. The server goes on with its old weights; start the trainer "
                f"again",
            )

    def _run(self) -> None:
        group: SwiftTrainerGroup | None = None
        tensors: dict[str, Any] = {}
        try:
            with boundary("engine"):
                group = self._join()
        except Failed as failed:
            self._problem = failed.failure.message
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Future):
                job.set_result(tensors)
                tensors = {}
            elif group is not None and self._problem is None:
                try:
                    with boundary("engine"):
                        tensors |= split_tensors(group.receive(job.count, job.dtype), job.places)
                except Failed as failed:
                    self._problem = failed.failure.message


# routes

SwiftRoute = tuple[str, str, Callable[[EngineLoop], Handler]]

_ADAPTERS = ("update_adapter_flattened_param", "update_adapter_param")
_WEIGHTS = ("init_communicator", "update_named_param", "update_flattened_params", "process_weights_after_loading")
_EMPTIED = {"message": "each weight update empties the caches"}
_CACHES = ("reset_encoder_cache", "reset_mm_cache")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "num_beams": (1,),
    "n": (1,),
    "best_of": (None,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (None,),
    "structured_outputs_regex": (None,),
    "stream": (False,),
}
"""Keys of a request_config that this server does not have, and the values that mean the same without them."""


class InferBody(BaseModel):
    """The body of `POST /infer/`, as ms-swift's client sends it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    infer_requests: list[dict[str, Any]]
    """The conversations: messages, data_dict, uuid, tools."""
    request_config: dict[str, Any] | None = None
    """Sampling parameters; null values are those of the server's recipe."""
    use_tqdm: bool | None = None
    """Whether ms-swift's own server shows a progress bar. Not used."""
    metrics: list[Any] | None = None
    """Metrics of ms-swift's own client. Not used."""
    adapter_request: dict[str, Any] | None = None
    """An adapter; refused."""


def swift_routes(
    conversations: ConversationQueue, weights: SwiftWeights | None, *, multi_turn: bool, gym: bool
) -> list[SwiftRoute]:
    """The routes. `weights` None: this process cannot receive weights. `multi_turn` and `gym` say what kind of environment the
    recipe has."""
    engine_type = {
        "engine_type": "AsyncLLMEngine",
        "enable_multi_turn": multi_turn,
        "use_gym_env": gym,
        "enable_lora": False,
    }
    return [
        ("GET", "/health/", lambda loop: _constant({"status": "ok"})),
        ("POST", "/get_engine_type/", lambda loop: _constant(engine_type)),
        ("GET", "/get_world_size/", lambda loop: _constant({"world_size": 1})),
        ("POST", "/infer/", lambda loop: _infer(conversations, loop)),
        *(_no_weight_routes() if weights is None else _weight_routes(weights)),
        *(("POST", f"/{name}/", lambda loop: _constant(_EMPTIED)) for name in _CACHES),
        *(("POST", f"/{name}/", lambda loop: _no_adapter) for name in _ADAPTERS),
    ]


def _weight_routes(weights: SwiftWeights) -> list[SwiftRoute]:
    return [
        ("POST", "/init_communicator/", lambda loop: _connect(weights, loop)),
        ("POST", "/update_named_param/", lambda loop: _announce(weights, loop, TensorBody)),
        ("POST", "/update_flattened_params/", lambda loop: _announce(weights, loop, BucketBody)),
        ("POST", "/process_weights_after_loading/", lambda loop: _load(weights, loop)),
        # older versions of ms-swift end an update with this request
        ("POST", "/reset_prefix_cache/", lambda loop: _load(weights, loop)),
        ("POST", "/close_communicator/", lambda loop: _disconnect(weights, loop)),
    ]


def _no_weight_routes() -> list[SwiftRoute]:
    return [
        *(("POST", f"/{name}/", lambda loop: _no_weights) for name in _WEIGHTS),
        ("POST", "/reset_prefix_cache/", lambda loop: _constant(_EMPTIED)),
        ("POST", "/close_communicator/", lambda loop: _constant({"message": "no trainer is connected"})),
    ]


def _constant(answer: Mapping[str, Any]) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(dict(answer))

    return handler


async def _no_weights(request: Request) -> Response:
    raise RequestRefused(
        501,
        f"{request.url.path} is not available: ms-swift's trainer sends weights by NCCL through vLLM's communicator. To receive "
        f"them, the process of `turnwise serve` needs a GPU that the trainer does not use, and the package vllm in its "
        f"environment. Without them, train with `turnwise train RECIPE rollout_server.url=...` "
        f"(`turnwise convert --from swift` makes the recipe)",
    )


async def _no_adapter(request: Request) -> Response:
    raise RequestRefused(
        501,
        f"{request.url.path} is not available: ms-swift's trainer merges its adapter and sends all weights to this server, which "
        f"says so in /get_engine_type/ (enable_lora is false)",
    )


def _connect(weights: SwiftWeights, loop: EngineLoop) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await read_body(request, CommunicatorBody)
        here = request.scope.get("server") or (
            "127.0.0.1",
            0,
        )  # the group listens where the trainer has reached the server
        await loop.call(weights.connect(here[0], body, _trainer(request)))
        return JSONResponse({"message": "waiting for the trainer"})

    return handler


def _announce(weights: SwiftWeights, loop: EngineLoop, kind: type[BucketBody | TensorBody]) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        await loop.call(weights.announce(await read_body(request, kind)))
        return JSONResponse({"message": "waiting for the broadcast"})

    return handler


def _load(weights: SwiftWeights, loop: EngineLoop) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        # not cancelled with the request: a trainer that disconnects must not leave half of the weights
        loaded = await asyncio.shield(asyncio.ensure_future(loop.call(weights.load())))
        return JSONResponse({**_EMPTIED, **(loaded or {})})

    return handler


def _disconnect(weights: SwiftWeights, loop: EngineLoop) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        await loop.call(weights.disconnect())
        return JSONResponse({"message": "closed"})

    return handler


def _trainer(request: Request) -> str:
    """The name of the trainer in the lease."""
    return f"ms-swift's trainer at {request.client.host if request.client is not None else 'an unknown address'}"


def _infer(conversations: ConversationQueue, loop: EngineLoop) -> Handler:
    async def handler(request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await read_body(request, InferBody, longest=MAX_BODY)
        if body.adapter_request is not None:
            raise RequestRefused(400, "adapter_request is not supported: the server samples from its own weights")
        asked = [
            _conversation(number, item, body.request_config or {}) for number, item in enumerate(body.infer_requests)
        ]
        sampling, longest = _sampling(body.request_config or {}, conversations.context.sampling)
        if not asked:
            return JSONResponse([])
        finished = await loop.call(conversations.run_trajectories(asked, sampling, tokens_per_turn=longest))
        outputs: list[dict[str, Any]] = []
        for trajectory, item in zip(finished, body.infer_requests, strict=True):
            if trajectory.error is not None:
                raise RequestRefused(
                    500, f"a conversation failed ({trajectory.error.kind}): {trajectory.error.message}"
                )
            outputs += _outputs(trajectory, str(item.get("uuid") or trajectory.id))
        return JSONResponse(outputs)

    return handler


def _conversation(number: int, item: Mapping[str, Any], config: Mapping[str, Any]) -> ConversationBody:
    if any(item.get(kind) for kind in ("audios", "objects")):
        raise RequestRefused(
            400, f"infer_requests.{number} contains audio or objects, and this server takes images only"
        )
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestRefused(400, f"infer_requests.{number}.messages must be a list of messages; got {messages!r:.80}")
    if messages[-1].get("role") == "assistant":  # ms-swift's trainer may send the data set's answer
        messages = messages[:-1]
    messages = with_images(messages, item.get("images") or [], item.get("videos") or [], f"infer_requests.{number}")
    seed = config.get("seed")
    fields = dict(item.get("data_dict") or {})
    for name in ("tools", "chat_template_kwargs"):
        if item.get(name):
            fields[name] = item[name]
    if not isinstance(fields.get("chat_template_kwargs") or {}, Mapping):
        raise RequestRefused(400, f"infer_requests.{number}.chat_template_kwargs must be an object")
    return ConversationBody(
        id=str(number),
        seed=secrets.randbits(62) if seed is None else int(seed) + number,
        row=RowBody(id=str(item.get("uuid") or number), messages=messages, fields=fields),
    )


def _sampling(config: Mapping[str, Any], recipe: Sampling) -> tuple[Sampling, int | None]:
    """The sampling of a request_config, and the most tokens of a turn. Raises RequestRefused for what is not supported."""
    for name, accepted in _NEUTRAL.items():
        if name in config and config[name] not in accepted:
            raise RequestRefused(400, f"request_config.{name}={config[name]!r} is not supported: remove it")
    given = {name: config[name] for name in ("temperature", "top_p", "top_k", "min_p") if config.get(name) is not None}
    if "top_k" in given:
        given["top_k"] = max(int(given["top_k"]), 0)
    stop = tuple(config.get("stop") or recipe.stop)
    longest = config.get("max_tokens")
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise RequestRefused(400, f"request_config.max_tokens={longest!r} must be a positive number")
    return replace(recipe, **given, stop=stop), longest


def _outputs(trajectory: Trajectory, uuid: str) -> list[dict[str, Any]]:
    """ms-swift's RolloutOutput of each segment. All outputs of a trajectory have the same id."""
    infos = infos_of(trajectory)
    return [
        _output(trajectory, segment, uuid, infos)
        for segment in trajectory.segments
        if max(segment.turn, default=-1) >= 0
    ]


def _output(trajectory: Trajectory, segment: Segment, uuid: str, infos: Mapping[str, Any]) -> dict[str, Any]:
    sampled = sorted({turn for turn in segment.turn if turn >= 0})
    last = trajectory.turns[sampled[-1]]
    histories = [*trajectory.previous_histories, trajectory.messages]
    history, shown = flatten_media(histories[last.history])
    if shown != flatten_media(trajectory.row.messages)[1]:  # the trainer must see what the model has seen
        infos = {**infos, **encoded_media(shown)}
    # the last output has the complete conversation; an earlier segment ends with its last turn
    ends = len(history) if last is trajectory.turns[-1] else (last.message_index or 0) + 1
    ids, masks, logprobs = _answers(trajectory.turns, segment, sampled)
    completion = last.completion
    prompt = segment.turn.index(sampled[0])
    return {
        "response": {
            "model": "turnwise",
            "id": uuid,
            "object": "chat.completion",
            "created": int(trajectory.started or 0),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": str(last.message.get("content") or "")},
                    "finish_reason": "length" if last.finish_reason == "length" else "stop",
                    "token_ids": list(completion.token_ids) if completion is not None else ids[-1],
                }
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": len(segment) - prompt,
                "total_tokens": len(segment),
            },
            "prompt_token_ids": list(segment.token_ids[:prompt]),
        },
        "messages": history[:ends],
        "response_token_ids": ids,
        "response_loss_mask": masks,
        "rollout_logprobs": logprobs,
        "rollout_infos": dict(infos),
    }


def _answers(
    turns: Sequence[Turn], segment: Segment, sampled: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Token ids, loss mask and log-probabilities of each assistant message. A resumed turn and its continuation are one
    message, with the text between them masked."""
    ids, masks, logprobs = list[list[int]](), list[list[int]](), list[list[float]]()
    continued, end = False, 0
    for index in sampled:
        first = segment.turn.index(index)
        last = len(segment) - 1 - segment.turn[::-1].index(index)
        start = end if continued else first
        span = range(start, last + 1)
        mask = [int(segment.turn[position] >= 0 and turns[segment.turn[position]].weight > 0) for position in span]
        columns = (
            [segment.token_ids[position] for position in span],
            mask,
            [segment.logprobs[p] for p, m in zip(span, mask, strict=True) if m],
        )
        if continued:
            for known, new in zip((ids, masks, logprobs), columns, strict=True):
                known[-1].extend(new)  # type: ignore[arg-type]
        else:
            ids.append(columns[0])
            masks.append(columns[1])
            logprobs.append(columns[2])
        continued, end = turns[index].kept_tokens is not None, last + 1
    return ids, masks, logprobs
