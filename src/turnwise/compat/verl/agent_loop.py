"""The names that verl's agent loops import: `verl.experimental.agent_loop.agent_loop`, and the modules around it.

A loop derives from `AgentLoopBase` and overrides `run`. It calls `self.server_manager.generate` with token ids, and returns an
`AgentLoopOutput`. `agent_loops` runs it; this module has what the loop's own code uses. The helpers of the base class encode
messages with turnwise's renderer, so that the boundaries between turns are those of the model's template.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from turnwise.chat.media_parts import has_media
from turnwise.compat.token_prompts import TokenPrompts
from turnwise.environments.agents.token_agent import TokenCall, TokenModel
from turnwise.types import Message, SamplingChange, ToolSchema

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "LLMServerClient",
    "TokenOutput",
    "ToolListWrap",
    "get_event_loop",
    "register",
    "registered",
    "simple_timer",
]

T = TypeVar("T", bound=type)

_FORCED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
"""Sampling parameters that the recipe decides, because training needs all tokens from the same distribution."""
_NEUTRAL = (
    "logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "return_logprob",
    "no_stop_trim",
    "priority",
)
"""These change neither the tokens nor their log-probabilities."""


class AgentLoopMetrics(BaseModel):
    """Times of a loop in seconds: recorded."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What a loop returns: one trajectory as tokens.

    Example: `prompt_ids=P0 P0, response_ids=A0 A0 E0 A1, response_mask=1 1 0 1`.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for each sampled token that is trained on, 0 for all others."""
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    """The reward of the conversation, if the loop computes it."""
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class TokenOutput(BaseModel):
    """What `generate` returns: `verl.workers.rollout.replica.TokenOutput`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    """`completed`, also if a limit cut the answer."""
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


class DictConfigWrap:
    """Holds a configuration for the constructor of a loop."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Holds the tools for the constructor of a loop."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


class LLMServerClient:
    """The model of one conversation, as a loop calls it: verl's `server_manager`."""

    def __init__(self, model: TokenModel, prompts: TokenPrompts, sampling_params: Mapping[str, Any]) -> None:
        self.prompts = prompts
        self.last_token: int | None = None
        """The last token that the model sampled in this conversation."""
        self._model = model
        self._given = dict(sampling_params)
        """The sampling parameters that the loop was given."""

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample behind a prompt. Raises ValueError for images, and for a sampling parameter that is not known."""
        if any(data is not None and len(data) > 0 for data in (image_data, video_data, audio_data)):
            raise ValueError(
                "generate(image_data=...): agent loops are given text only here: use verl's tools with "
                "turnwise.compat.verl:Conversations, whose conversations may have images"
            )
        sampling, forced = self._sampling(sampling_params)
        ids = [int(token) for token in prompt_ids]
        turn = await self._model.generate(TokenCall(prompt_ids=ids, sampling=sampling, forced=forced))
        assert turn.completion is not None
        tokens = list(turn.completion.token_ids)
        self.last_token = tokens[-1] if tokens else self.last_token
        versions = {"global_steps": turn.completion.versions[-1]} if tokens else {}
        return TokenOutput(
            token_ids=tokens, log_probs=list(turn.completion.logprobs), stop_reason="completed", extra_fields=versions
        )

    def _sampling(self, params: Mapping[str, Any]) -> tuple[SamplingChange, dict[str, Any]]:
        """The change of the sampling that the parameters ask for, and those that have no effect."""
        forced: dict[str, Any] = {}
        change: dict[str, Any] = {}
        for name, value in params.items():
            if value is None or name in _NEUTRAL or (name in self._given and value == self._given[name]):
                continue
            if name in ("max_tokens", "max_new_tokens"):
                change["max_tokens"] = int(value)
            elif name == "stop":
                change["stop"] = [value] if isinstance(value, str) else list(value)
            elif name == "stop_token_ids":
                change["stop_token_ids"] = [int(token) for token in value]
            elif name in _FORCED:
                forced[name] = value
            elif not (name == "n" and value == 1):
                known = ", ".join(("max_tokens", "stop", "stop_token_ids", *_FORCED))
                raise ValueError(
                    f"generate(sampling_params={{{name!r}: {value!r:.60}}}) is not supported; there are: {known}"
                )
        return SamplingChange(**change, answers_cut=True), forced


AsyncLLMServerManager = LLMServerClient
"""The name up to verl v0.7."""


class MergeResult(NamedTuple):
    """The result of the `ct_merge` helpers."""

    token_ids: list[int]
    """All tokens up to the next prompt."""
    appended_token_count: int


class AgentLoopBase(ABC):
    """The base class of agent loops. A loop is made for each conversation; `run` leads the conversation."""

    _class_initialized = False

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: LLMServerClient,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs = self.data_config.get("mm_processor_kwargs", {})
        self.system_prompt: list[int] = []
        """Empty: `apply_chat_template` encodes new messages without the system prompt."""
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """What all instances share; called for each instance (verl up to v0.6)."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Lead a conversation; `kwargs` are the columns of the row, and `raw_prompt`, its messages."""
        raise NotImplementedError

    async def process_vision_info(self, messages: list[Message]) -> dict[str, Any]:
        """The images of messages: none. Raises ValueError if there are any."""
        return await self.process_multi_modal_info(messages)

    async def process_multi_modal_info(self, messages: list[Message]) -> dict[str, Any]:
        """The images of messages: none. Raises ValueError if there are any."""
        if has_media(messages):
            raise ValueError("the row has images, and agent loops are given text only here: leave the row out")
        return {}

    async def apply_chat_template(
        self,
        messages: list[Message],
        tools: list[ToolSchema] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """The tokens of a prompt. With `remove_system_prompt`: of new messages behind the model's last turn.

        The new messages include what the template writes between the turn and the messages, which verl leaves out.
        """
        prompts = self.server_manager.prompts
        if remove_system_prompt and self.server_manager.last_token is not None:
            return prompts.encode_next(self.server_manager.last_token, messages, tools=tools)
        return prompts.encode_opening(messages, tools)

    async def ct_build_initial_tokens(
        self, messages: list[Message], tools: list[ToolSchema] | None = None, **media: Any
    ) -> list[int]:
        """The tokens of the first prompt."""
        return self.server_manager.prompts.encode_opening(messages, tools)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append what the model sampled, to the tokens, the mask and the log-probabilities."""
        count = len(assistant_token_ids)
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count)
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [0.0] * count)]
        return merged, [*response_mask, *[1] * count], logprobs

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: list[ToolSchema] | None = None,
    ) -> tuple[MergeResult, list[int], list[float] | None]:
        """Append new messages and the next generation prompt, to the tokens, the mask and the log-probabilities."""
        new = self.server_manager.prompts.encode_next(
            runtime_token_ids[-1], updated_messages[len(previous_messages) :], before=previous_messages, tools=tools
        )
        merged = MergeResult([*runtime_token_ids, *new], len(new))
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(new)]
        return merged, [*response_mask, *[0] * len(new)], logprobs

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise ValueError("agent loops are given text only here")

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return dict(self.mm_processor_kwargs or {})

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        return prompt_ids  # limits.context decides


_agent_loop_registry: dict[str, dict[str, Any]] = {}
"""verl's registry: the configuration of each loop by its name."""
_classes: dict[str, type] = {}
"""The registered classes by their full names."""


def register(agent_name: str) -> Any:
    """Register a class under a name: rows select it with the column `agent_name`."""

    def decorator(subclass: T) -> T:
        name = f"{subclass.__module__}.{subclass.__qualname__}"
        _agent_loop_registry[agent_name] = {"_target_": name}
        _classes[name] = subclass
        return subclass

    return decorator


def registered() -> Mapping[str, type]:
    """The registered classes by the names that rows select them with."""
    found = {name: _classes.get(str(entry.get("_target_"))) for name, entry in _agent_loop_registry.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop: `verl.utils.ray_utils.get_event_loop`."""
    return asyncio.get_running_loop()


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, Any]) -> Iterator[None]:
    """Add the seconds of a block to `timing_raw[name]`: `verl.utils.profiler.simple_timer`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started
