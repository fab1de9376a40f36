"""vLLM's asynchronous engine (AsyncLLM) in the process of turnwise: the same requests as to a server, without HTTP.

turnwise must run in the environment that vLLM is installed in. vLLM's engine core, which computes, is a process that AsyncLLM
starts and stops.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from turnwise.engines.remote.experts import ExpertLayers
from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.engines.remote.server_process import is_other_build, python_path, start_advice, without_rank
from turnwise.engines.remote.servers import Owner, Part, ServerInfo, WakePart
from turnwise.engines.remote.weights import BY_GLOO, Sending, WeightUpdate
from turnwise.engines.vllm.api import (
    ADAPTER,
    WAKE_TAGS,
    Labels,
    WeightSender,
    grammar_params,
    image_features,
    routed_experts_params,
    sampling_params,
)
from turnwise.errors import ConfigError, EngineError
from turnwise.types import LogprobKind, Request, Routes

_LEASE = 1e9  # seconds; no other trainer can reach this engine


class InProcessServer(HttpServer):
    """Stands for the engine where a server stands: it is started by the first check of its health, with these arguments.
    `environment` is for the processes that compute; it chooses their GPUs. `given` are the arguments of the recipe."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, given: Sequence[str] = ()
    ) -> None:
        super().__init__("http://in-process")
        self._arguments, self._given = arguments, given
        self._environment = environment or {}
        self._llm: Any | None = None

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM. Raises ServerLost if it was not started, or has died."""
        if self._llm is None or self._llm.errored:
            raise ServerLost(
                "vLLM's engine in this process is not running; vLLM's messages on the terminal have the reason"
            )
        return self._llm

    async def healthy(self, path: str, *, timeout: float = 5.0) -> bool:
        if self._llm is not None and self._llm.errored:
            self._llm.shutdown()
            self._llm = None
        if self._llm is None:
            with started_processes_have({"PYTHONPATH": python_path(), **self._environment}):
                self._llm = _start(self._arguments, self._given)
        return True

    async def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            llm.shutdown()


class InProcessApi:
    """The `ServerApi` of vLLM's engine in this process."""

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
        self._adapter = adapter
        self._experts = experts
        self._labels = Labels(owner, on=labels)
        self._sender = WeightSender(owner.name, _LEASE, sending)
        self._request_ids = itertools.count()
        self._lora_ids = itertools.count(1)
        self._loras: dict[str, Any] = {}
        """vLLM's requests for the trained adapters, by policy; empty before the first update."""

    def close(self) -> None:
        self._sender.close()

    async def identify(self, server: HttpServer) -> None:
        pass

    async def info(self, server: HttpServer) -> ServerInfo:
        self._loras.clear()  # an engine that was started again has none
        return ServerInfo(
            vocab_size=self._vocab_size,
            context=_llm(server).model_config.max_model_len,
            logprob_kind=LogprobKind.SAMPLED,  # `launch.engine_arguments` has --logprobs-mode processed_logprobs
        )

    async def check_grammar(self, server: HttpServer) -> None:
        pass  # `launch.engine_arguments` has the backend that reads them

    async def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
            RequestOutputKind,
            StructuredOutputsParams,
        )
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
            EngineGenerateError,
        )

        llm = _llm(server)
        params = SamplingParams(
            **sampling_params(request.sampling, request.seed),
            **{name: StructuredOutputsParams(**form) for name, form in grammar_params(request).items()},
            **routed_experts_params(self._experts, request),
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = _prompt(request, self._labels.of(version) + request.policy)
        outputs = llm.generate(
            prompt, params, f"turnwise-{next(self._request_ids)}", lora_request=self._loras.get(request.policy)
        )
        count = 0
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    (choice,) = output.outputs
                    ids = list(choice.token_ids)
                    count += len(ids)
                    yield Part(token_ids=ids, logprobs=_logprobs(ids, choice.logprobs))
                    if choice.finish_reason is not None:
                        spans = [(span.version, span.start, span.end) for span in choice.weight_versions or ()]
                        versions = self._labels.versions(server.url, spans, count)
                        if request.policy and versions is not None:
                            versions = [version] * count  # as at a server
                        yield Part(
                            finish="aborted" if choice.finish_reason == "abort" else choice.finish_reason,
                            all_versions=versions,
                            cached_tokens=output.num_cached_tokens,
                            routes=self._routes(server, choice.routed_experts),
                        )
                        return
        except EngineError:
            raise
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed at the request: {error}") from error
        except ValueError as error:
            raise EngineError(f"vLLM refused the request: {error}") from error
        except (EngineDeadError, RuntimeError) as error:
            raise ServerLost(f"vLLM's engine in this process has died: {error}") from error

    def _routes(self, server: HttpServer, numbers_TLK: Any) -> Routes | None:
        return None if self._experts is None or numbers_TLK is None else self._experts.routes(server.url, numbers_TLK)

    async def claim(self, server: HttpServer) -> None:
        await self._sender.claim(server.url, partial(_rpc, server))

    async def release(self, server: HttpServer) -> None:
        pass

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        # a request keeps its adapter: it is sent again, with the tokens that it has, to go on with the new one
        await _llm(server).pause_generation(mode="abort" if abort or self._adapter else "keep")

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        if update.adapter:
            from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

            # not in place: vLLM would read the files again in each step of a request that carries this object
            number = next(self._lora_ids)
            lora = LoRARequest(lora_name=f"{ADAPTER}-{number}", lora_int_id=number, lora_path=str(update.path))
            await _llm(server).add_lora(lora)
            previous, self._loras[update.policy] = self._loras.get(update.policy), lora
            if previous is not None:
                await _llm(server).remove_lora(previous.lora_int_id)
        else:
            await self._sender.send(server.url, update, partial(_rpc, server))
        if not update.policy:
            await self.label(server, update.version)

    async def label(self, server: HttpServer, version: int) -> None:
        await _llm(server).update_weight_version(self._labels.of(version))

    async def resume(self, server: HttpServer) -> None:
        await _llm(server).resume_generation()

    async def sleep(self, server: HttpServer) -> None:
        await _llm(server).sleep(1)

    async def wake(self, server: HttpServer, part: WakePart) -> None:
        await _llm(server).wake_up([WAKE_TAGS[part]])


async def _rpc(server: HttpServer, method: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Call a method of `worker.WeightReceiver` in all workers."""
    return list(await _llm(server).collective_rpc(method, kwargs=dict(arguments)))


def _llm(server: HttpServer) -> Any:
    assert isinstance(server, InProcessServer)
    return server.llm


@contextmanager
def started_processes_have(environment: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started inside have these environment variables besides those of this process, and are no training
    ranks."""
    hidden = os.environ.keys() - without_rank(os.environ).keys()
    before = {name: os.environ.get(name) for name in (*hidden, *environment)}
    for name in hidden:
        del os.environ[name]
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def not_here(reason: str) -> ConfigError:
    """The error of a recipe whose engine is to run in this process, where vLLM cannot be imported."""
    return ConfigError(
        f"engine.mode=in_process needs vLLM in the environment that runs turnwise ({reason}): pip install 'turnwise[vllm]', or "
        f"install turnwise in vLLM's environment, or use engine.mode=server with engine.python (docs/engines.md)"
    )


def _start(arguments: Sequence[str], given: Sequence[str]) -> Any:
    """A running AsyncLLM. Raises ConfigError if vLLM is not installed here, EngineError if it does not start."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if is_other_build(str(error)):
            raise ConfigError(
                f"engine.mode=in_process cannot import vLLM: {error}. {start_advice(str(error))}"
            ) from None
        raise not_here(str(error)) from None
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    try:
        parsed = parser.parse_args(list(arguments))
    except SystemExit:  # its message is on the terminal
        raise ConfigError(f"vLLM does not take its arguments. {start_advice('', given)}") from None
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed))
    except (ValueError, RuntimeError) as error:
        advice = start_advice(str(error), given)
        raise EngineError(
            f"vLLM's engine could not be started in this process: {error}{'.' if advice else ''} {advice}".rstrip()
        ) from error


def _prompt(request: Request, salt: str) -> Any:
    """The prompt of a request, with its images, as vLLM's engine takes it. `salt` is the key of its prefix cache."""
    features = image_features(request)
    if features is None:
        return {"prompt_token_ids": list(request.token_ids), "cache_salt": salt}
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (  # pyright: ignore[reportMissingImports]
        decode_mm_kwargs_item,
    )
    from vllm.inputs import mm_input  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    items = [decode_mm_kwargs_item(data) for data in features["kwargs_data"]["image"]]
    return mm_input(
        prompt_token_ids=list(request.token_ids),
        mm_kwargs=MultiModalKwargsItems({"image": items}),
        mm_hashes=features["mm_hashes"],
        mm_placeholders={"image": [PlaceholderRange(**place) for place in features["mm_placeholders"]["image"]]},
        cache_salt=salt,
    )


def _logprobs(ids: Sequence[int], logprobs: Sequence[Any] | None) -> list[float]:
    """The log-probability of each token; fewer numbers if vLLM reports fewer, which `check_part` refuses."""
    return [entry[token].logprob for token, entry in zip(ids, logprobs or (), strict=False)]
