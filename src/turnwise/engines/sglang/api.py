"""The HTTP requests of a SGLang server: token ids in, token ids and log-probabilities out, and weight updates.

Tokens: `/generate` with `input_ids` and `return_logprob`, as a stream. Weights: `/pause_generation`,
`/update_weights_from_disk` (or `/load_lora_adapter`), `/update_weight_version` and `/continue_generation`; by broadcasts,
`/init_weights_update_group` and `/update_weights_from_distributed`; in shared memory, `/update_weights_from_tensor` (`loader`).

Running requests are retracted during an update: SGLang computes their prefixes again with the new weights. The label of the
weights at the server names the run, the time and the version: it gives each token its version, and refuses a second trainer.
Names and shapes are compared before an update (SGLang accepts a file with missing weights, and dies at a wrong shape), and
checksums after it. Knows SGLang's routes. Does not know conversations or learners.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.engines.remote.experts import ExpertLayers, first_unknown
from turnwise.engines.remote.http import HttpServer, ServerFailed, ServerLost, ServerRefused
from turnwise.engines.remote.images import checked_images
from turnwise.engines.remote.servers import Owner, Part, ServerInfo, WakePart, check_grammar_probe, expected_form
from turnwise.engines.remote.weights import (
    BY_GLOO,
    Sending,
    TrainerGroups,
    WeightShapes,
    WeightUpdate,
    read_shapes,
)
from turnwise.engines.sglang.images import encode_images
from turnwise.engines.sglang.weights import Contents, broadcast, check_checksums, contents_of, share
from turnwise.errors import EngineError
from turnwise.models.grammar import PROBE, PROBE_GRAMMAR, with_stops
from turnwise.types import LogprobKind, Media, Request, Routes, Sampling

# Requests

_WAKE_TAGS: Mapping[WakePart, Sequence[str]] = {"weights": ("weights",), "cache": ("cuda_graph", "kv_cache")}
"""SGLang's names of the parts of its memory."""
PauseMode = Literal["retract", "in_place", "abort"]
"""What happens to running requests during an update, as SGLang names it."""
_LEASE = 900.0
"""Seconds after its last update after which another trainer may take over the server of a trainer that has died."""
_PROBE_TEMPERATURE = 3.0
"""The temperature at which the meaning of reported log-probabilities is determined: far from 1, where all kinds are equal."""

_log = logging.getLogger(__name__)


class SglangApi:
    """The `ServerApi` of SGLang.

    `vocab_size` is that of the recipe's model: SGLang dies at a token id outside of the vocabulary. `context` is the longest
    sequence that the model knows. `shapes` are those of the model's weights, None if they are not known; then the first update
    defines them. `labels` says that the weights are updated and labelled with versions, `adapter` that the updates are those of
    an adapter. `sending` is how weights are broadcast. `owner` is this process, as the servers know it. With `experts`,
    completions have the experts of their tokens.
    """

    name = "SGLang"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        labels: bool,
        adapter: bool = False,
        pause: PauseMode = "retract",
        shapes: WeightShapes | None = None,
        sending: Sending = BY_GLOO,
        owner: Owner,
        experts: ExpertLayers | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._experts = experts
        self.context = context
        self._labels = labels
        self._pause_mode: PauseMode = "abort" if adapter else pause  # a running request keeps its adapter
        self._shapes = shapes
        self._groups = TrainerGroups(sending)
        self._owner = owner
        self._facts: dict[str, Mapping[str, Any]] = {}
        """/server_info of each server."""
        self._adapters: dict[tuple[str, str], str] = {}
        """The names of the adapters that servers have, by server and policy."""
        self._aborts: set[asyncio.Task[Any]] = set()
        """Requests to free cancelled requests. The event loop keeps only weak references to tasks."""

    def close(self) -> None:
        self._groups.close()

    async def identify(self, server: HttpServer) -> None:
        await self._server_info(server)

    async def info(self, server: HttpServer) -> ServerInfo:
        facts = await self._server_info(server)
        if self._experts is not None and not facts.get("enable_return_routed_experts"):
            raise EngineError(
                f"model.router_replay=true, and {server.url} reports no experts: start it with --enable-return-routed-experts"
            )
        self._facts[server.url] = facts
        self._adapters = {key: name for key, name in self._adapters.items() if key[0] != server.url}
        self._groups.drop(server.url)  # the workers are new if the server was started again
        return ServerInfo(
            vocab_size=self.vocab_size,
            context=min(self.context, facts["max_req_input_len"] + 1),
            logprob_kind=await self._logprob_kind(server),
        )

    async def _server_info(self, server: HttpServer) -> dict[str, Any]:
        """The options of the server. Raises EngineError if it is no SGLang server."""
        facts = await server.get("/server_info")
        if not isinstance(facts, dict) or not isinstance(facts.get("max_req_input_len"), int):
            raise EngineError(f"{server.url} is no SGLang server: /server_info must report max_req_input_len")
        return facts

    async def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        images = image_data(request)
        facts, rid = self._facts[server.url], f"{self._owner.process}-{secrets.token_hex(8)}"
        body = {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "image_data": images,
            "sampling_params": {
                **sampling_params(
                    request.sampling, request.seed if facts.get("enable_deterministic_inference") else None
                ),
                **grammar_params(request),
            },
            "return_logprob": True,
            "stream": True,
            "lora_path": self._adapters.get((server.url, request.policy)),
            # prefixes that other weights have computed have another key, and are never hit
            "extra_key": f"{self._owner.process}:{version}{request.policy}",
        }
        if self._experts is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": first_unknown(request)}
        incremental, known, complete = bool(facts.get("incremental_streaming_output")), 0, False
        try:
            async for event in server.events("/generate", body):
                with expected_form(server.url, self.name):
                    part = self._part(server, event, request, 0 if incremental else known, version)
                known += len(part.token_ids)
                complete = part.finish is not None
                yield part
        except ServerRefused as error:
            if images is None:
                raise
            raise EngineError(
                f"{server.url} takes no processed images: start it with SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE="
                f"turnwise.engines.sglang.processors, with turnwise's source on PYTHONPATH (docs/engines.md): {error}"
            ) from error
        finally:
            if not complete:
                self._abort(server, rid)

    async def claim(self, server: HttpServer) -> None:
        name, claimed = await self._labelled(server)
        remaining = _LEASE - (server.now() - int(claimed)) if claimed.isdigit() else 0.0
        if name != self._owner.name and remaining > 0:
            raise EngineError(
                f"another trainer ({name}) owns {server.url}. Two trainers would overwrite each other's weights: use another "
                f"server, stop the other trainer, or wait {remaining:.0f} s if it has died"
            )

    async def release(self, server: HttpServer) -> None:
        name, _ = await self._labelled(server)
        if name == self._owner.name:  # else another trainer has the server now
            await self._set_label(server, "released")

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        await server.post("/pause_generation", {"mode": "abort" if abort else self._pause_mode})

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        await self.claim(server)
        if update.adapter:
            await self._load_adapter(server, update)
        else:
            contents = contents_of(update)
            if self._shapes is not None:
                self._shapes.check(contents.shapes)
            await self._load_weights(server, update)
            await self._check_checksums(server, contents)
            self._shapes = self._shapes or WeightShapes(contents.shapes)
        if not update.policy:
            await self.label(server, update.version)

    async def label(self, server: HttpServer, version: int) -> None:
        await self._set_label(server, f"{self._owner.name}#{self._owner.process}:{int(server.now())}:{version}")

    async def resume(self, server: HttpServer) -> None:
        await server.post("/continue_generation", {"torch_empty_cache": False})

    async def probe(self, server: HttpServer, token_ids: Sequence[int]) -> list[float]:
        answer = await server.post(
            "/generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "lora_path": self._adapters.get((server.url, "")),
                "extra_key": secrets.token_hex(8),  # nothing is taken from the prefix cache
            },
        )
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    async def sleep(self, server: HttpServer) -> None:
        # SGLang's scheduler dies if a request is still running, such as one that was cancelled a moment ago: the pause aborts
        # all requests, and waits for their end
        await self.pause(server, abort=True)
        await server.post("/release_memory_occupation", {})

    async def wake(self, server: HttpServer, part: WakePart) -> None:
        await server.post("/resume_memory_occupation", {"tags": list(_WAKE_TAGS[part])})

    # tokens

    def _part(self, server: HttpServer, event: Mapping[str, Any], request: Request, known: int, version: int) -> Part:
        """The tokens of an event after the first `known`, which earlier events had. `version` is that of the weights when the
        request was sent."""
        meta = event["meta_info"]
        ids = (event.get("output_ids") or [])[known:]
        logprobs = [entry[0] for entry in (meta.get("output_token_logprobs") or [])[known:]]
        finish = self._finish(server, meta.get("finish_reason"), request.sampling)
        versions = None
        if finish is not None and self._labels:
            versions = self._versions(server, meta.get("weight_versions"), meta.get("completion_tokens", 0))
            if request.policy:  # a request keeps its adapter; the label is that of the model's weights
                versions = [version] * len(versions)
            if self._pause_mode == "in_place" and not self._facts[server.url].get("disable_overlap_schedule"):
                versions = with_pending_tokens(versions, version)
        return Part(
            token_ids=ids,
            logprobs=logprobs,
            finish=finish,
            all_versions=versions,
            cached_tokens=meta.get("cached_tokens"),
            routes=None if finish is None else self._routes(server, meta, request),
        )

    def _routes(self, server: HttpServer, meta: Mapping[str, Any], request: Request) -> Routes | None:
        """The experts of the tokens whose experts were not known. Those of the last token do not exist."""
        if self._experts is None:
            return None
        tokens = len(request.token_ids) + meta.get("completion_tokens", 0) - 1 - first_unknown(request)
        return self._experts.of_int32(server.url, meta.get("routed_experts"), tokens)

    def _finish(
        self, server: HttpServer, reason: Mapping[str, Any] | None, sampling: Sampling
    ) -> Literal["stop", "length", "aborted"] | None:
        match reason:
            case None:
                return None
            case {"type": "stop", "matched": int(token)} if token not in sampling.stop_token_ids:
                # a stop token of the model's own configuration, which ends no turn here: the engine asks for the rest
                return "aborted"
            case {"type": "stop"}:
                return "stop"
            case {"type": "length"}:
                return "length"
            case {"type": "abort"} if not reason.get("status_code"):
                return "aborted"
            case {"type": "abort", "status_code": int(status)} if 400 <= status < 500:
                raise ServerRefused(f"{server.url} refused the request: {reason.get('message') or reason}", status)
            case _:
                raise ServerFailed(f"{server.url} ended a request with finish_reason={reason}")

    def _versions(self, server: HttpServer, spans: Sequence[Mapping[str, Any]] | None, count: int) -> list[int]:
        """The version of each of the `count` tokens of a request, from the spans that the server reports.

        Raises ServerLost if a label is not of this run: then the server was restarted, and has the weights of its start.
        """
        versions = [-1] * count
        for span in spans or ():
            owner, _, number = str(span["version"]).rpartition(":")
            process = owner.rpartition(":")[0].rpartition("#")[2]
            if process != self._owner.process or not number.isdigit():
                raise ServerLost(
                    f"{server.url} has weights with the label {span['version']!r}, which is not of this run: it was restarted"
                )
            start, end = int(span["start"]), min(int(span["end"]), count)
            versions[start:end] = [int(number)] * (end - start)
        if -1 in versions:
            raise EngineError(
                f"{server.url} reported the weight version of {count - versions.count(-1)} of {count} tokens"
            )
        return versions

    def _abort(self, server: HttpServer, rid: str) -> None:
        """Free a request whose answer is not wanted any more. Does not wait for the server's answer."""

        async def abort() -> None:
            try:
                await server.post("/abort_request", {"rid": rid}, timeout=10.0)
            except EngineError as error:  # the server has gone, and the request with it
                _log.debug("%s", error)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def check_grammar(self, server: HttpServer) -> None:
        params = {**sampling_params(Sampling(max_tokens=len(PROBE)), None), "ebnf": PROBE_GRAMMAR}
        fix = "start the server with --grammar-backend=llguidance, or remove engine.grammars"
        body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True}
        try:
            answer = await server.post("/generate", body)
        except ServerRefused as error:
            raise EngineError(f"{server.url} does not read the grammars of turns: {fix}: {error}") from error
        with expected_form(server.url, self.name):
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            check_grammar_probe(server.url, answer["output_ids"], logprobs, fix)

    async def _logprob_kind(self, server: HttpServer) -> LogprobKind:
        """Which distribution the reported log-probabilities belong to, determined with a high temperature.

        It is `tempered`, unless the server was started with SGLANG_RETURN_ORIGINAL_LOGPROB=1.
        """
        prompt = [5, 6, 7]
        sampling = Sampling(temperature=_PROBE_TEMPERATURE, max_tokens=12)
        body = {"input_ids": prompt, "sampling_params": sampling_params(sampling, None), "return_logprob": True}
        answer = await server.post("/generate", body)
        with expected_form(server.url, self.name):
            ids, entries = answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
            raw = (await self.probe(server, [*prompt, *ids]))[len(prompt) - 1 :]
            difference = max(abs(entry[0] - other) for entry, other in zip(entries, raw, strict=True))
        return LogprobKind.RAW if difference < 1e-3 else LogprobKind.TEMPERED

    # weights

    async def _load_weights(self, server: HttpServer, update: WeightUpdate) -> None:
        """Let the server read the file, or receive the tensors. SGLang reads directories: the file gets one for that time."""
        facts, flush = self._facts[server.url], self._pause_mode != "in_place"
        workers = facts.get("tp_size", 1) * facts.get("pp_size", 1)
        if update.checksums is not None:
            device = self._groups.sending.device
            await share(server, update, device=device, workers=workers, flush_cache=flush)
            return
        if update.tensors is not None:
            await broadcast(self._groups, server, update.tensors, workers=workers, flush_cache=flush)
            return
        assert update.path is not None
        folder = update.path.with_suffix(".sglang")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(update.path)
        try:
            answer = await server.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": flush})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not (answer or {}).get("success"):
            raise EngineError(f"{server.url} has not loaded the weights: {answer}")

    async def _check_checksums(self, server: HttpServer, contents: Contents) -> None:
        """Compare the weights of a server on the CPU with those of the update."""
        facts = self._facts[server.url]
        if facts.get("device") == "cpu" and facts.get("tp_size") == 1:
            answer = await server.post("/weights_checker", {"action": "checksum"})
            with expected_form(server.url, self.name):
                (rank,) = answer["ranks"]
                check_checksums(server.url, rank["checksums"], contents)

    async def _load_adapter(self, server: HttpServer, update: WeightUpdate) -> None:
        """Load an adapter under a new name, and unload the previous one of the policy."""
        assert update.path is not None
        name, place = f"{self._owner.process}-{update.path.name}", (server.url, update.policy)
        try:
            await server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(update.path)})
        except ServerRefused as error:
            raise EngineError(
                f"{server.url} takes no LoRA adapter: start it with --enable-lora, --max-lora-rank and --lora-target-modules "
                f"(docs/engines.md): {error}"
            ) from error
        previous, self._adapters[place] = self._adapters.get(place), name
        if previous is not None:
            await server.post("/unload_lora_adapter", {"lora_name": previous})

    async def _labelled(self, server: HttpServer) -> tuple[str, str]:
        """The name of the owner of the server's weights and the time of its last update, from their label; empty without an
        owner."""
        answer = await server.get("/model_info")
        with expected_form(server.url, self.name):
            parts = str(answer["weight_version"]).rsplit(":", 2)
        return (parts[0].rpartition("#")[0] or parts[0], parts[1]) if len(parts) == 3 else ("", "")

    async def _set_label(self, server: HttpServer, label: str) -> None:
        await server.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})


def with_pending_tokens(versions: Sequence[int], sent: int) -> list[int]:
    """The version of each token, from those that a server reports that pauses in place and runs ahead of its results.

    Such a server has launched one more pass when it pauses, and reads its tokens after the label has changed: the first token
    with a new label is from the weights before. `sent` is the version when the request was sent: a request of which nothing had
    been read has no label of that time.

    Example: 3 tokens by version 4 and 2 by version 5 are reported as 4, 4, 5, 5, 5 and become 4, 4, 4, 5, 5.
    """
    return [min(sent, number) if index == 0 else versions[index - 1] for index, number in enumerate(versions)]


def grammar_params(request: Request) -> dict[str, str]:
    """The sampling parameter that holds a turn to its grammar, which SGLang's backend `llguidance` reads."""
    return {} if request.constraint is None else {"ebnf": with_stops(request.constraint)}


def image_data(request: Request) -> list[str] | None:
    """The field `image_data` of a request; None without images. Raises EngineError for images that SGLang does not take."""
    images = checked_images(request, "sglang")
    if not images:
        return None
    _refuse_other_placeholders(request, images)
    import torch

    tensors = {name: torch.cat([image.inputs[name] for image in images]) for name in images[0].inputs}
    return [encode_images(tensors, [(image.start, image.start + image.length - 1) for image in images])]


def _refuse_other_placeholders(request: Request, images: Sequence[Media]) -> None:
    """Raise EngineError if the model has sampled a placeholder: SGLang would take it for the next image in its positions."""
    placeholder = request.token_ids[images[0].start]
    of_images = sum(image.length for image in images)
    others = list(request.token_ids).count(placeholder) - of_images
    if others:
        raise EngineError(
            f"the conversation has {others} tokens {placeholder} that belong to no image: the model sampled the placeholder of "
            f"images, and SGLang would compute wrong positions for the images after it. Use engine.name=vllm or local if the "
            f"model does this often"
        )


def sampling_params(sampling: Sampling, seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters. `seed` is None for servers that keep no seeds."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(set(sampling.stop_token_ids)),
        # SGLang always stops at the tokens of the model's configuration, too, unless it ignores all stop tokens
        "ignore_eos": not sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if seed is not None:
        params["sampling_seed"] = seed
    return params


def model_shapes(folder: Path) -> WeightShapes | None:
    """The shapes of a model directory's weights; None if the directory has no safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    return read_shapes(files) if files else None
