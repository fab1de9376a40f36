"""The `infer_engine` of a scheduler: whoever asks it hands the model's next turn over to the loop, and waits.

A scheduler that overrides `run` has a flow of its own. It runs as a task; each of its calls becomes one turn of the one loop
(`conversation.Run`). Which conversation a call belongs to is told by the task that it is made in.
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

__all__ = ["Asks", "InferEngine", "Template", "asking", "load_tokenizer", "sampling_change"]

_FREE = {"logprobs", "top_logprobs", "prompt_logprobs", "return_details", "stream", "max_tokens", "stop"}
"""Options of a request that do not change the distribution: a scheduler may change them."""


_OPTIONS = {"temperature", "top_k", "top_p", "min_p"}
"""Options of a request that the recipe has under `sampling`."""


class Asks(Protocol):
    """A conversation that a scheduler's `run` leads."""

    async def ask(self, request: RolloutInferRequest, sampling: SamplingChange) -> ChatCompletionResponse:
        """Let the model speak, with this change to the recipe's sampling."""
        ...


asking: ContextVar[Asks] = ContextVar("asking")
"""The conversation of the task that is running."""


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
    """What ms-swift knows of a chat template."""

    is_thinking: bool = True
    """Whether thoughts are taken out of earlier answers: where there are none, that changes nothing."""


class Template:
    """What schedulers use a template for: its tokenizer, and a history without the thoughts of earlier answers."""

    def __init__(self, engine: InferEngine) -> None:
        self._engine = engine
        self.mode = "vllm"
        """As ms-swift has it: in `train` the thoughts of earlier answers are taken out."""
        self.template_meta = TemplateMeta()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names."""
        return self._engine.tokenizer

    def _swift_prepare_inputs(self, inputs: Any) -> None:
        """Take the thoughts out of all answers of `inputs.messages` but one at their end."""
        answers = [
            one for one in inputs.messages[:-1] if one["role"] == "assistant" and isinstance(one["content"], str)
        ]
        for message in answers:
            message["content"] = message["content"].rpartition("</think>")[2].strip()


class InferEngine:
    """What a scheduler finds as `self.infer_engine`."""

    def __init__(self, tokenizer: str | None = None) -> None:
        self._path = tokenizer
        self.template = Template(self)
        """For `infer_engine.template.tokenizer` and `infer_engine.template.template_meta`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the recipe names; loaded when somebody asks for it."""
        if self._path is None:
            raise ConfigError(
                "the scheduler uses a tokenizer, and the recipe names none: set environment.arguments.tokenizer to the model's "
                "directory"
            )
        return load_tokenizer(self._path)

    @property
    def default_template(self) -> Template:
        """Another name of `template`."""
        return self.template

    @property
    def engine(self) -> InferEngine:
        """The engine below this one: here there is none, so it is this one."""
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
        """Let the model answer. Only for what `run` has started, and one call at a time.

        Raises ValueError if the request wants something else sampled than the recipe does.
        """
        if isinstance(infer_request, dict):
            infer_request = RolloutInferRequest(**infer_request)
        change = sampling_change(request_config if request_config is not None else RequestConfig())
        if adapter_request is not None:
            raise ValueError("adapter_request chooses weights, and there is one model here; leave it out")
        conversation = asking.get(None)
        if conversation is None:
            raise RuntimeError(
                "infer_async is for schedulers that override run; step must return the next infer_request"
            )
        return await conversation.ask(infer_request, change)

    def infer(
        self, infer_requests: Sequence[RolloutInferRequest], request_config: RequestConfig | None = None
    ) -> list[ChatCompletionResponse]:
        """Refused: it would block every other conversation. Raises RuntimeError."""
        raise RuntimeError(
            "infer_engine.infer blocks until the model has answered; write: response = await "
            "self.infer_engine.infer_async(infer_request, request_config)"
        )


def sampling_change(config: RequestConfig) -> SamplingChange:
    """What a request changes about the recipe's sampling: `max_tokens` and `stop`; the rest must have its default.

    Raises ValueError if it changes the distribution that tokens are sampled from, TypeError if it is no RequestConfig.
    """
    if not isinstance(config, RequestConfig):
        raise TypeError(f"request_config must be a RequestConfig; it is {config!r:.80}")
    plain = RequestConfig()
    changed = [name for name in vars(plain) if name not in _FREE and getattr(config, name) != getattr(plain, name)]
    if changed:
        name = changed[0]
        fix = f"set sampling.{name} in the recipe" if name in _OPTIONS else "the recipe has no such option"
        raise ValueError(
            f"the scheduler asks with {name}={getattr(config, name)!r}. Training compares log-probabilities under one "
            f"distribution, the recipe's: leave {name} of the request_config as it is; {fix}. A scheduler may change max_tokens "
            f"and stop"
        )
    stop = [config.stop] if isinstance(config.stop, str) else config.stop
    return SamplingChange(max_tokens=config.max_tokens, stop=stop or None)
