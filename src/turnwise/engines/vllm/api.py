"""The HTTP requests of a vLLM server: token ids in, token ids and log-probabilities out, images, and weight updates.

Tokens: `/inference/v1/generate`, as a stream. Weights: `/pause`, `/collective_rpc` to `worker.WeightReceiver` (or
`/v1/load_lora_adapter`), `/update_weight_version` and `/resume`. The second group exists only if the server was started with
VLLM_SERVER_DEV_MODE=1. `WeightSender` makes the same calls for servers and for the engine in this process.

vLLM 0.32 takes a processed image as base64 of msgpack (`vllm.v1.serial_utils`): for each input of the model the data [dtype,
shape, bytes] and a field, which says how vLLM puts the images of several requests together. Knows vLLM's routes. Does not know
conversations or learners.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import secrets
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

from turnwise.engines.remote.experts import ExpertLayers, first_unknown
from turnwise.engines.remote.http import HttpServer, ServerFailed, ServerLost, ServerRefused
from turnwise.engines.remote.images import checked_images, content_hash, tensor_bytes
from turnwise.engines.remote.servers import Owner, Part, ServerInfo, WakePart, check_grammar_probe, expected_form
from turnwise.engines.remote.shared_buffer import SharedBuffer, buffer_size, parts_of
from turnwise.engines.remote.weights import BY_GLOO, CannotShare, Sending, TrainerGroups, WeightUpdate, sharing_with
from turnwise.errors import EngineError
from turnwise.models.grammar import PROBE, PROBE_GRAMMAR, with_stops
from turnwise.types import LogprobKind, Media, Request, Sampling

# Images: hashes, positions of the placeholders, and processed tensors

_RAW = 3
"""vLLM's code of the msgpack extension for the bytes of a tensor."""


def image_features(request: Request) -> dict[str, Any] | None:
    """The field `features` of a request; None without images. Raises EngineError for images that vLLM does not take."""
    images = checked_images(request, "vllm")
    if not images:
        return None
    encoded = [_encode(image) for image in images]
    return {
        "mm_hashes": {"image": [content for content, _ in encoded]},
        "mm_placeholders": {"image": [{"offset": image.start, "length": image.length} for image in images]},
        "kwargs_data": {"image": [data for _, data in encoded]},
    }


@cache
def _encodings() -> MutableMapping[Any, tuple[str, str]]:
    """Hash and encoding of images, by their tensors of pixels. A conversation sends its images again with each turn."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _encode(image: Media) -> tuple[str, str]:
    """The hash of an image, and its tensors as base64."""
    known = _encodings()
    pixels, grid = image.inputs["pixel_values"], image.inputs["image_grid_thw"]
    if pixels not in known:
        flat = {"keep_on_cpu": False, "slices": [[0, len(pixels), None]], "dim": 0}
        item = {
            "pixel_values": {"data": _tensor(pixels), "field": ["flat", flat]},
            "image_grid_thw": {"data": _tensor(grid[0]), "field": ["batched", {"keep_on_cpu": True}]},
        }
        known[pixels] = content_hash(image.inputs), base64.b64encode(_msgpack(item)).decode()
    return known[pixels]


def _tensor(tensor: Any) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor_bytes(tensor)]


def _msgpack(value: Any) -> bytes:
    """msgpack of nested dictionaries, lists, texts, integers, booleans and None; bytes become vLLM's extension for tensors."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return struct.pack(">Bq", 0xD3, value)
        case str():
            return struct.pack(">BI", 0xDB, len(value.encode())) + value.encode()
        case bytes():
            return struct.pack(">BIb", 0xC9, len(value), _RAW) + value
        case list():
            return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(_msgpack, value))
        case dict():
            return struct.pack(">BI", 0xDF, len(value)) + b"".join(
                _msgpack(part) for pair in value.items() for part in pair
            )
        case _:
            raise TypeError(f"{type(value).__name__} has no msgpack form here")


# Weights: calls of `worker.WeightReceiver`

WorkerCall = Callable[[str, Mapping[str, Any]], Awaitable[list[dict[str, Any]]]]
"""Calls a method of `worker.WeightReceiver` in all workers of a server, with these arguments. Returns one result of each."""


class WeightSender:
    """Sends updates to the workers of servers, as the owner of the servers' weights (`Owner.name`). `lease` is the time in
    seconds after which another owner may take over. `sending` is how weights are broadcast, and the device of shared memory."""

    def __init__(self, owner: str, lease: float, sending: Sending) -> None:
        self._claim = {"owner": owner, "lease": lease}
        self._groups = TrainerGroups(sending)

    async def claim(self, server: str, call: WorkerCall) -> None:
        """Become the owner of the weights of the server at this URL."""
        self._groups.drop(server)  # the workers are new if the server was started again
        workers = await _all(server, call("turnwise_claim", self._claim))
        if self._groups.sending.shared:
            await self._try_to_share(server, len(workers), call)

    async def _try_to_share(self, server: str, workers: int, call: WorkerCall) -> None:
        """Raise CannotShare unless the workers can open memory of this process."""
        try:
            async with self._opened(1, server, workers, call):
                pass
        except ServerLost:
            raise
        except (EngineError, RuntimeError) as error:
            raise CannotShare(f"{server} cannot read weights from the trainer's memory: {error}") from error

    @asynccontextmanager
    async def _opened(self, size: int, server: str, workers: int, call: WorkerCall) -> AsyncIterator[SharedBuffer]:
        """A context with a buffer of `size` bytes that all workers have opened. Raises EngineError, or RuntimeError of torch."""
        buffer, lost = SharedBuffer(size, self._groups.sending.device), False
        try:
            handles = [buffer.handle() for _ in range(workers)]
            await _all(server, call("turnwise_open", {**self._claim, "handles": handles}))
            yield buffer
        finally:
            try:
                await call("turnwise_close", {"owner": self._claim["owner"]})
            except EngineError as error:
                lost = isinstance(error, ServerLost)
            finally:
                buffer.close(lost=lost)

    async def send(self, server: str, update: WeightUpdate, call: WorkerCall) -> None:
        """Replace the weights of all workers. Raises EngineError if they have the previous weights, ServerLost if they do not."""
        if update.tensors is None:
            arguments = {**self._claim, "path": str(update.path), "checksum": update.checksum}
            results = await _all(server, call("turnwise_load", arguments))
        elif update.checksums is not None:
            results = await self._share(server, update, call)
        else:
            results = await self._broadcast(server, update.tensors, update.checksum, call)
        for result in results:
            if result.get("checksum") != update.checksum:
                raise EngineError(f"{server} has loaded other weights than those of the trainer: it reports {result}")

    def close(self) -> None:
        """Leave all groups."""
        self._groups.close()

    async def _broadcast(
        self, server: str, tensors: Mapping[str, Any], checksum: str, call: WorkerCall
    ) -> list[dict[str, Any]]:
        weights, workers = await self._announce(server, tensors, call)
        await self._groups.open(
            server,
            workers,
            lambda where: _all(server, call("turnwise_join", {**self._claim, "address": asdict(where)})),
        )
        arguments = {"weights": weights, "checksum": checksum, "backend": self._groups.sending.backend}
        return await self._groups.send(server, tensors.values(), _all(server, call("turnwise_receive", arguments)))

    async def _announce(self, server: str, tensors: Mapping[str, Any], call: WorkerCall) -> tuple[list[list[Any]], int]:
        """The names, dtypes and shapes of weights, which the server has compared with its own, and the number of workers."""
        weights = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
        ]
        workers = await _all(server, call("turnwise_expect", {**self._claim, "weights": weights}))
        return weights, len(workers)

    async def _share(self, server: str, update: WeightUpdate, call: WorkerCall) -> list[dict[str, Any]]:
        """Send weights through memory that the workers open. They check all parts before they load the first one."""
        tensors = update.source
        assert update.checksums is not None
        _, workers = await self._announce(server, tensors, call)
        parts = parts_of(tensors, update.checksums)
        results: list[dict[str, Any]] = []
        with sharing_with(server):
            async with self._opened(buffer_size(parts), server, workers, call) as buffer:
                # a part is checked again when it is loaded: of one part, that is enough
                for load in (False, True) if len(parts) > 1 else (True,):
                    for part in parts:
                        await asyncio.to_thread(buffer.fill, part, tensors)
                        places = [asdict(place) for place in part]
                        arguments = {**self._claim, "places": places, "load": load, "last": part is parts[-1]}
                        results = await _all(server, call("turnwise_part", arguments))
        return results


async def _all(server: str, call: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all workers. Raises EngineError if one reports an error."""
    results = await call
    for result in results:
        if "error" in result:
            raise (ServerLost if result.get("broken") else EngineError)(f"{server}: {result['error']}")
    return results


# Requests

MODEL = "policy"
"""The name under which a server that turnwise starts serves the model."""
ADAPTER = "policy-adapter"
"""How the names of the trained adapter begin. Each update has a name of its own: vLLM keeps the request that has loaded a name
for all requests of this name, and would read an adapter that was loaded in place from its file in each step of the engine."""
_STREAM_INTERVAL = 16
"""Tokens of an event: as many tokens as are lost, at most, when a server dies. Fewer tokens would cost more time."""
_LEASE = 900.0
"""Seconds after which another trainer may take over a server whose trainer has died without releasing it."""
_PROBE_TOKENS = 12
"""Tokens from which the meaning of reported log-probabilities is determined."""

WAKE_TAGS: Mapping[WakePart, str] = {"weights": "weights", "cache": "kv_cache"}
"""vLLM's names of the parts of its memory."""

_log = logging.getLogger(__name__)


class Labels:
    """The texts with which this process labels the weights of a server: its own name and the version.

    `on`: whether the weights are labelled at all, which they are if they change.
    """

    def __init__(self, owner: Owner, *, on: bool) -> None:
        self._process = owner.process
        self._on = on

    def of(self, version: int) -> str:
        """The label of a version."""
        return f"{self._process}:{version}"

    def versions(self, server: str, spans: Sequence[tuple[str, int, int]], count: int) -> list[int] | None:
        """The version of each of the `count` tokens of a request, from spans (label, start, end).

        None without weight updates. Raises ServerLost if a label is not of this run: then the server was restarted, and has
        the weights of its start. Raises EngineError if a token has no label.
        """
        if not self._on:
            return None
        versions = [-1] * count
        for label, start, end in spans:
            process, _, version = str(label).partition(":")
            if process != self._process or not version.isdigit():
                raise ServerLost(f"{server} has weights with the label {label!r}, not of this run: it was restarted")
            versions[start : min(end, count)] = [int(version)] * (min(end, count) - start)
        if -1 in versions:
            raise EngineError(f"{server} reported the weight version of {count - versions.count(-1)} of {count} tokens")
        return versions


class VllmApi:
    """The `ServerApi` of vLLM. `vocab_size` is that of the model of the recipe.

    `labels` says that the weights are updated and labelled with versions, `adapter` that the updates are those of an adapter.
    `sending` is how weights are broadcast. `owner` is this process, as the servers know it. With `experts`, completions have the
    experts of their tokens.
    """

    name = "vLLM"

    def __init__(
        self,
        *,
        vocab_size: int,
        labels: bool,
        adapter: bool = False,
        sending: Sending = BY_GLOO,
        owner: Owner,
        experts: ExpertLayers | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._experts = experts
        self._owner = owner
        self._labels = Labels(owner, on=labels)
        self._adapter = adapter
        self._sender = WeightSender(owner.name, _LEASE, sending)
        self._models: dict[str, str] = {}
        """The name of the model at each server."""
        self._adapters: dict[tuple[str, str], str] = {}
        """The names of the adapters that servers have, by server and policy; empty before the first update."""
        self._checked_pixels: set[str] = set()
        """Servers that take the pixels of images as the trainer has them."""

    def close(self) -> None:
        self._sender.close()

    async def identify(self, server: HttpServer) -> None:
        await self._base_model(server)

    async def info(self, server: HttpServer) -> ServerInfo:
        base = await self._base_model(server)
        self._models[server.url] = base["id"]
        # a server that was started again has none
        self._adapters = {key: name for key, name in self._adapters.items() if key[0] != server.url}
        return ServerInfo(
            vocab_size=self._vocab_size, context=base["max_model_len"], logprob_kind=await self._logprob_kind(server)
        )

    async def _base_model(self, server: HttpServer) -> dict[str, Any]:
        """What the server says about its model. Raises EngineError if it is no vLLM server."""
        answer = await server.get("/v1/models")
        with expected_form(server.url, self.name):
            base = next((model for model in answer["data"] if model.get("parent") is None), None)
        if base is None or not isinstance(base.get("max_model_len"), int):
            raise EngineError(f"{server.url} is no vLLM server: /v1/models must name a model with its max_model_len")
        return base

    async def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        features = image_features(request)
        if features is not None:
            await self._check_pixels(server, request)
        body = {
            "model": self._served_model(server, request.policy),
            "token_ids": list(request.token_ids),
            "features": features,
            "sampling_params": {
                **sampling_params(request.sampling, request.seed),
                **grammar_params(request),
                "stream_interval": _STREAM_INTERVAL,
                **routed_experts_params(self._experts, request),
            },
            # blocks that other weights have computed have another salt, and are never hit
            "cache_salt": self._labels.of(version) + request.policy,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        finish, versions, cached, count, routes = None, None, None, 0, None
        async for event in server.events("/inference/v1/generate", body):
            with expected_form(server.url, self.name):
                cached = _cached_tokens(event) if cached is None else cached
                parts = [
                    (_part(server, choice, self._experts), _spans(choice)) for choice in event.get("choices") or ()
                ]
            for part, spans in parts:
                count += len(part.token_ids)
                yield replace(part, finish=None, routes=None)
                if part.finish is not None:
                    finish, versions = part.finish, self._labels.versions(server.url, spans, count)
                    if request.policy and versions is not None:
                        versions = [
                            version
                        ] * count  # a request keeps its adapter; the label is that of the model's weights
                    routes = part.routes
        yield Part(finish=finish, all_versions=versions, cached_tokens=cached, routes=routes)

    async def claim(self, server: HttpServer) -> None:
        try:
            await self._sender.claim(server.url, partial(self._rpc, server))
        except ServerRefused as error:
            raise _without_dev_mode(server) if error.status == 404 else error from error

    async def release(self, server: HttpServer) -> None:
        await self._rpc(server, "turnwise_release", {"owner": self._owner.name})

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        # a request keeps its adapter: it is sent again, with the tokens that it has, to go on with the new one
        await server.post("/pause", query={"mode": "abort" if abort or self._adapter else "keep"})

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        if update.adapter:
            await self._load_adapter(server, update)
        else:
            await self._sender.send(server.url, update, partial(self._rpc, server))
        if not update.policy:
            await self.label(server, update.version)

    async def label(self, server: HttpServer, version: int) -> None:
        await server.post("/update_weight_version", {"new_version": self._labels.of(version)})

    async def resume(self, server: HttpServer) -> None:
        await server.post("/resume")

    async def sleep(self, server: HttpServer) -> None:
        await server.post("/sleep", query={"level": "1", "mode": "wait"})

    async def wake(self, server: HttpServer, part: WakePart) -> None:
        await server.post("/wake_up", query={"tags": WAKE_TAGS[part]})

    def _served_model(self, server: HttpServer, policy: str = "") -> str:
        """The name of the model that has the present weights. A new adapter changes nothing before the first update."""
        return self._adapters.get((server.url, policy), self._models[server.url])

    async def _load_adapter(self, server: HttpServer, update: WeightUpdate) -> None:
        """Load an adapter under a new name, and unload the previous one of the policy. No request may be running."""
        name, place = f"{ADAPTER}-{secrets.token_hex(4)}", (server.url, update.policy)
        await server.post_text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(update.path)})
        previous, self._adapters[place] = self._adapters.get(place), name
        if previous is not None:
            await server.post_text("/v1/unload_lora_adapter", {"lora_name": previous})

    async def _logprob_kind(self, server: HttpServer) -> LogprobKind:
        """Which distribution the reported log-probabilities belong to.

        With top_k=1, the sampled distribution gives each sampled token the probability 1. `--logprobs-mode processed_logprobs`
        therefore reports 0, and `raw_logprobs` (vLLM's default) reports log_softmax(logits).
        """
        sampling = sampling_params(Sampling(top_k=1, max_tokens=_PROBE_TOKENS), seed=1)
        body = {"model": self._models[server.url], "token_ids": [5, 6, 7], "sampling_params": sampling}
        try:
            answer = await server.post("/inference/v1/generate", body)
        except ServerRefused as error:
            if error.status in (403, 404):
                raise EngineError(
                    f"{server.url} does not take token ids: start the server with --enable-scale-out (docs/engines.md)"
                ) from error
            raise
        with expected_form(server.url, self.name):
            sampled = _part(server, answer["choices"][0], self._experts)
            highest, lowest = max(sampled.logprobs), min(sampled.logprobs)
        if self._experts is not None and sampled.routes is None:
            raise EngineError(
                f"model.router_replay=true, and {server.url} reports no experts: start it with --enable-return-routed-experts"
            )
        if highest > 1e-3:
            raise EngineError(
                f"{server.url} reports logits ({highest}) instead of log-probabilities: start the server with "
                f"--logprobs-mode processed_logprobs"
            )
        return LogprobKind.SAMPLED if lowest > -1e-6 else LogprobKind.RAW

    async def check_grammar(self, server: HttpServer) -> None:
        sampling = sampling_params(Sampling(max_tokens=len(PROBE)), seed=1)
        body = {
            "model": self._models[server.url],
            "token_ids": [5, 6, 7],
            "sampling_params": {**sampling, "structured_outputs": {"grammar": PROBE_GRAMMAR}},
        }
        fix = "start the server with --structured-outputs-config.backend guidance, or remove engine.grammars"
        try:
            answer = await server.post("/inference/v1/generate", body)
        except ServerRefused as error:
            raise EngineError(f"{server.url} does not read the grammars of turns: {fix}: {error}") from error
        with expected_form(server.url, self.name):
            sampled = _part(server, answer["choices"][0], self._experts)
        check_grammar_probe(server.url, sampled.token_ids, sampled.logprobs, fix)

    async def _check_pixels(self, server: HttpServer, request: Request) -> None:
        """Refuse a server that expects raw pixels and normalizes them itself, which is vLLM's default. Asked once.

        The server is asked to process an image of the request: with its default, the result has integers.
        """
        if server.url in self._checked_pixels:
            return
        image = {"type": "image_url", "image_url": {"url": _png(request.media[0].source)}}
        body = {"model": self._models[server.url], "messages": [{"role": "user", "content": [image]}]}
        answer = await server.post("/v1/chat/completions/render", body)
        (data,) = answer["features"]["kwargs_data"]["image"]
        if b"uint8" in base64.b64decode(data):
            raise EngineError(
                f"{server.url} normalizes the pixels of images, which turnwise has normalized: start the server with "
                f"--no-mm-device-do-normalize (docs/engines.md)"
            )
        self._checked_pixels.add(server.url)

    async def _rpc(self, server: HttpServer, method: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Call a method of `worker.WeightReceiver` in all workers of a server."""
        answer = await server.post("/collective_rpc", {"method": method, "kwargs": dict(arguments)})
        return [result for result in (answer or {}).get("results", []) if isinstance(result, dict)]


def sampling_params(sampling: Sampling, seed: int) -> dict[str, Any]:
    """vLLM's sampling parameters. Only the given stop tokens end a turn, not those of the model's generation config."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        "ignore_eos": True,
        "logprobs": 0,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return params


def grammar_params(request: Request) -> dict[str, Any]:
    """The sampling parameter that holds a turn to its grammar, which vLLM's backend `guidance` reads."""
    return {} if request.constraint is None else {"structured_outputs": {"grammar": with_stops(request.constraint)}}


def routed_experts_params(experts: ExpertLayers | None, request: Request) -> dict[str, int]:
    """The sampling parameter from which token on experts are reported, for a server that reports them."""
    return {} if experts is None else {"routed_experts_prompt_start": first_unknown(request)}


def _part(server: HttpServer, choice: Mapping[str, Any], experts: ExpertLayers | None) -> Part:
    finish = choice.get("finish_reason")
    finishes = {None: None, "stop": "stop", "length": "length", "abort": "aborted"}
    if finish not in finishes:
        raise ServerFailed(f"{server.url} ended a request with finish_reason={finish!r}")
    content = (choice.get("logprobs") or {}).get("content") or []
    return Part(
        token_ids=list(choice.get("token_ids") or []),
        logprobs=[entry.get("logprob") for entry in content],
        finish=finishes[finish],
        routes=None if experts is None else experts.of_npy(server.url, choice.get("routed_experts")),
    )


def _spans(choice: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """The label of the weights of the tokens from a start to an end."""
    return [
        (str(span["version"]), int(span["start"]), int(span["end"])) for span in choice.get("weight_versions") or ()
    ]


def _png(image: Any) -> str:
    """A PIL image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _cached_tokens(event: Mapping[str, Any]) -> int | None:
    details = ((event.get("usage") or {}).get("prompt_tokens_details")) or {}
    return details.get("cached_tokens")


def _without_dev_mode(server: HttpServer) -> EngineError:
    return EngineError(
        f"{server.url} takes no weight updates: start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
        f"turnwise.engines.vllm.worker.WeightReceiver, with turnwise's source on PYTHONPATH (docs/engines.md)"
    )
