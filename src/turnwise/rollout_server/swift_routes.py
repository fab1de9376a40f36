"""The routes that ms-swift's trainer calls at a `swift rollout` server.

`/infer/` runs conversations. The routes about weights announce what the trainer then sends by NCCL (`swift_weights`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from turnwise.compat.swift.messages import flatten_media
from turnwise.compat.swift.rewards import infos_of
from turnwise.rollout_server.conversations import ConversationQueue
from turnwise.rollout_server.http import EngineLoop, Handler, read_body
from turnwise.rollout_server.images import MAX_BODY
from turnwise.rollout_server.swift_images import encoded_media, with_images
from turnwise.rollout_server.swift_weights import BucketBody, CommunicatorBody, SwiftWeights, TensorBody
from turnwise.rollout_server.wire import ConversationBody, RowBody
from turnwise.serve.http import RequestRefused
from turnwise.types import Sampling, Segment, Trajectory, Turn

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["SwiftRoute", "swift_routes"]

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
