"""The `infer_engine` of a scheduler: a call of it becomes one turn of the rollout loop, and waits for that turn.

A scheduler that overrides `run` has a control flow of its own, and runs as a task (`run_environment`). The context variable
`current_run` of that task says which conversation a call belongs to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.compat.swift.protocol import ChatCompletionResponse, RequestConfig, RolloutInferRequest
from turnwise.errors import ConfigError
from turnwise.types import SamplingChange

__all__ = ["InferEngine", "Run", "Template", "current_run", "load_tokenizer", "sampling_change"]

_FREE = {"logprobs", "top_logprobs", "prompt_logprobs", "return_details", "stream", "max_tokens", "stop"}
"""Options of a request that do not change the sampled distribution. A scheduler may set them."""


_OPTIONS = {"temperature", "top_k", "top_p", "min_p"}
"""Options of a request that the recipe has under `sampling`."""


class Run(Protocol):
    """The `run` of one conversation."""

    async def infer(self, request: RolloutInferRequest, sampling: SamplingChange) -> ChatCompletionResponse:
        """Sample the next turn, with these changes to the recipe's sampling."""
        ...


current_run: ContextVar[Run] = ContextVar("current_run")
"""The `run` that the current task belongs to."""


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """A transformers tokenizer."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=Path(path).is_dir())
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"environment.arguments.tokenizer: no tokenizer could be loaded from {path!r}: {error}"
        ) from error


@dataclass(frozen=True)
class TemplateMeta:
    """Properties of a chat template, as in ms-swift."""

    is_thinking: bool = True
    """Whether reasoning is removed from earlier answers. Without reasoning, it has no effect."""


class Template:
    """The parts of ms-swift's template that schedulers use: the tokenizer, and removing reasoning from earlier answers."""

    def __init__(self, engine: InferEngine) -> None:
        self._engine = engine
        self.mode = "vllm"
        """As in ms-swift: in the mode `train`, reasoning is removed from earlier answers."""
        self.template_meta = TemplateMeta()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names."""
        return self._engine.tokenizer

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Remove the reasoning from all assistant messages of `inputs.messages`, except the last message."""
        for message in inputs.messages[:-1]:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                message["content"] = message["content"].rpartition("</think>")[2].strip()


class InferEngine:
    """The `self.infer_engine` of a scheduler."""

    def __init__(self, tokenizer: str | None = None) -> None:
        self._path = tokenizer
        self.template = Template(self)
        """For `infer_engine.template.tokenizer` and `infer_engine.template.template_meta`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names, loaded on first use."""
        if self._path is None:
            raise ConfigError(
                "the scheduler uses a tokenizer, but the recipe names none: set environment.arguments.tokenizer to the model's "
                "directory"
            )
        return load_tokenizer(self._path)

    @property
    def default_template(self) -> Template:
        """Another name of `template`."""
        return self.template

    @property
    def engine(self) -> InferEngine:
        """This engine: there is no inner engine here."""
        return self

    async def get_tokenizer(self) -> Any:
        """For `infer_engine.engine.get_tokenizer()`."""
        return self.tokenizer

    async def infer_async(
        self,
        infer_request: RolloutInferRequest | dict[str, Any],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
        adapter_request: Any = None,
    ) -> ChatCompletionResponse:
        """Sample the next turn. Only from inside `run`, and one call at a time.

        Raises ValueError if the request changes the distribution that the recipe samples from.
        """
        if isinstance(infer_request, dict):
            infer_request = RolloutInferRequest(**infer_request)
        change = sampling_change(request_config if request_config is not None else RequestConfig())
        if adapter_request is not None:
            raise ValueError("adapter_request selects an adapter, but only one model is trained here; remove it")
        run = current_run.get(None)
        if run is None:
            raise RuntimeError("infer_async can only be called from run; step must return the next infer_request")
        return await run.infer(infer_request, change)

    def infer(
        self, infer_requests: Sequence[RolloutInferRequest], request_config: RequestConfig | None = None
    ) -> list[ChatCompletionResponse]:
        """Not supported, because it would block all other conversations. Raises RuntimeError."""
        raise RuntimeError(
            "infer_engine.infer blocks until the model has answered; write: response = await "
            "self.infer_engine.infer_async(infer_request, request_config)"
        )


def sampling_change(config: RequestConfig) -> SamplingChange:
    """The changes that a request makes to the recipe's sampling: `max_tokens` and `stop`. Other options must have their default.

    Raises ValueError if the request changes the sampled distribution, and TypeError if it is not a RequestConfig.
    """
    if not isinstance(config, RequestConfig):
        raise TypeError(f"request_config must be a RequestConfig; it is {config!r:.80}")
    default = RequestConfig()
    changed = [name for name in vars(default) if name not in _FREE and getattr(config, name) != getattr(default, name)]
    if changed:
        name = changed[0]
        fix = f"set sampling.{name} in the recipe" if name in _OPTIONS else "the recipe has no such option"
        raise ValueError(
            f"the scheduler's request has {name}={getattr(config, name)!r}. Training needs all tokens to be sampled from the "
            f"recipe's distribution: do not set {name} in the request_config; {fix}. A scheduler may change max_tokens and stop"
        )
    stop = [config.stop] if isinstance(config.stop, str) else config.stop
    return SamplingChange(max_tokens=config.max_tokens, stop=stop or None)
