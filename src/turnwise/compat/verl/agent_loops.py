"""Runs verl's agent loops: programs of the user that lead a conversation with token ids.

A loop derives from `AgentLoopBase` (`verl.experimental.agent_loop.agent_loop`) and overrides `run`. It calls
`self.server_manager.generate` with token ids, and returns an `AgentLoopOutput`. `AgentLoops` reads the classes once per run, from
verl's `agent_loop_config_path` and from Python files with `@register`. Rows select one by the column `agent_name`.

A loop runs beside the rollout loop (`environments.agents.token_agent`): each `generate` is one turn, and what the loop returns is
compared with what was sampled. The helpers of the base class encode messages with turnwise's renderer, so that the boundaries
between turns are those of the model's template."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field

from turnwise.chat.media_parts import has_media
from turnwise.compat.conversion import read_list, read_mapping, resolved
from turnwise.compat.token_prompts import TokenPrompts
from turnwise.compat.verl.base import call, takes
from turnwise.compat.verl.files import load_class
from turnwise.compat.verl.names import verl_names
from turnwise.environments.agents.histories import ReturnedSequence
from turnwise.environments.agents.token_agent import (
    TokenAgentEnvironment,
    TokenAgentResult,
    TokenCall,
    TokenModel,
)
from turnwise.environments.tools.tool import copy_containers
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.rollout.context import RolloutContext
from turnwise.types import Failure, Message, Row, SamplingChange, ToolSchema
from turnwise.user_code.references import load_file
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.thread_loops import own_loop

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
        """Sample after a prompt. Raises ValueError for images, and for a sampling parameter that is not known."""
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
        return SamplingChange(**change, answers_cut="max_tokens" in change), forced


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


_SPECIAL = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")


class AgentLoops:
    """The agent loops of a run, by name."""

    def __init__(self, loops: Mapping[str, Callable[..., Any]], config: Mapping[str, Any]) -> None:
        self._loops = loops
        self._config = config
        """verl's configuration, as far as the user gave it."""
        self._context: RolloutContext | None = None

    @property
    def names(self) -> list[str]:
        """The names by which rows select a loop."""
        return sorted(self._loops)

    def use_context(self, context: RolloutContext) -> None:
        """Take the renderer, the sampling and the limits of the run's conversations."""
        self._context = context

    def environment(self, name: str, row: Row, tools: Sequence[Any]) -> TokenAgentEnvironment:
        """The environment of one conversation, which the loop of that name leads. Raises Failed without an engine of tokens."""
        if self._context is None:
            raise Failed(
                Failure(
                    "environment",
                    f"the agent loop {name!r} calls the model with token ids: use an engine that samples tokens "
                    f"(engine.name=local)",
                )
            )
        renderer = self._context.renderer.for_arguments(row.chat_template_kwargs)
        prompts = TokenPrompts(renderer, row.messages)
        context = replace(self._context, renderer=renderer)
        agent = _LoopRun(name, self._loops[name], context, self._config, prompts, tools)
        return TokenAgentEnvironment(agent, prompts.describe)


def read_agent_loops(source: str | Sequence[str], *, config: str | Mapping[str, Any] | None = None) -> AgentLoops:
    """The loops of verl's YAML file, of Python files with `@register`, or of several of both. `config` has values of verl's
    configuration that the loops read.

    Example of a YAML file::

        - name: my_agent
          _target_: my_package.my_module.MyAgentLoop

    Raises ConfigError.
    """
    loops: dict[str, Callable[..., Any]] = {}
    for path in [source] if isinstance(source, str) else source:
        if path.endswith(".py"):
            with verl_names():
                load_file(Path(path), key="environment.arguments.agent_loops")
            continue
        for number, entry in enumerate(read_list(Path(path), what="the agent loop file")):
            place = f"{path}: entry {number}"
            if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or "_target_" not in entry:
                raise ConfigError(f"{place} must be a mapping with name and _target_; it is {entry!r:.80}")
            loops[entry["name"]] = _constructor(entry, place)
    for name, kind in registered().items():
        loops.setdefault(name, kind)
    if not loops:
        raise ConfigError(f"environment.arguments.agent_loops={source}: no class there is registered with @register")
    return AgentLoops(loops, _verl_config(config))


def _constructor(entry: Mapping[str, Any], place: str) -> Callable[..., Any]:
    """Makes the object of an entry with `_target_`, as Hydra does: the other keys are arguments."""
    kind = load_class(entry["_target_"], key=f"{place}._target_")
    if not callable(getattr(kind, "run", None)):
        raise ConfigError(f"{place}: the class {kind.__name__} has no method run(sampling_params, **kwargs)")
    return functools.partial(kind, *_built(entry.get("_args_", []), place), **_arguments(entry, place))


def _arguments(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    return {str(name): _built(value, f"{place}.{name}") for name, value in entry.items() if name not in _SPECIAL}


def _built(value: Any, place: str) -> Any:
    """A value of the file, with each nested mapping that has `_target_` replaced by the object that it describes."""
    if isinstance(value, list):
        return [_built(item, f"{place}.{number}") for number, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    arguments = _arguments(value, place)
    if "_target_" not in value:
        return arguments
    made = functools.partial(
        load_class(value["_target_"], key=f"{place}._target_"), *_built(value.get("_args_", []), place)
    )
    if value.get("_partial_"):
        return functools.partial(made, **arguments)
    try:
        with boundary("class"), verl_names():
            return made(**arguments)
    except Failed as failed:
        raise ConfigError(f"{place}: {value['_target_']} cannot be created: {failed.failure.message}") from failed


class _LoopRun:
    """One conversation that a loop leads (a TokenAgent)."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        context: RolloutContext,
        config: Mapping[str, Any],
        prompts: TokenPrompts,
        tools: Sequence[Any],
    ) -> None:
        self._name = name
        self._make = make
        self._context = context
        self._config = config
        self._prompts = prompts
        self._tools = tools

    async def run(self, row: Row, model: TokenModel) -> TokenAgentResult:
        """Make the loop and call its `run`. Raises Failed."""
        params = _sampling_params(self._context)
        client = LLMServerClient(model, self._prompts, params)
        loop = self._loop(client)
        name = f"{type(loop).__name__}.run"
        own_loop.set(None)  # a loop waits for the engine, which is in the loop of all conversations
        output = await call(loop.run, params, keywords=_row_fields(row), name=name, kind="environment")
        with boundary("environment"):
            return _result(output, name)

    def _loop(self, client: LLMServerClient) -> Any:
        config = _as_config(_merged(_defaults(self._context), self._config))
        tokenizer = _own_tokenizer(self._context.renderer.tokenizer)
        given: dict[str, Any] = {
            "trainer_config": DictConfigWrap(config),
            "server_manager": client,
            "tokenizer": tokenizer,
            "processor": None,
            "hf_model_type": None,
            "dataset_cls": None,
            "data_config": DictConfigWrap(config.data),
            "tools": ToolListWrap(list(self._tools)),
        }
        with boundary("environment"), verl_names():
            target = self._make.func if isinstance(self._make, functools.partial) else self._make
            # a class that was written for an earlier version of verl may take fewer
            return self._make(**{key: value for key, value in given.items() if takes(target, key, anything=True)})


@functools.lru_cache(maxsize=4)
def _own_tokenizer(tokenizer: Any) -> Any:
    """A copy of the tokenizer for all loops: a loop may change it, and the renderer's stays as it is.

    Its `apply_chat_template` returns a list of token ids, as in the versions of transformers that verl's loops were written for.
    """
    own = copy.deepcopy(tokenizer)
    own.apply_chat_template = functools.partial(own.apply_chat_template, return_dict=False)
    return own


def _row_fields(row: Row) -> dict[str, Any]:
    """The keyword arguments of `run`: the columns of the row in copies, with verl's names."""
    fields = {name: value for name, value in copy_containers(dict(row.fields)).items() if name != "agent_name"}
    info = fields.get("extra_info") if isinstance(fields.get("extra_info"), Mapping) else {}
    for name in ("tools_kwargs", "interaction_kwargs"):
        fields[name] = fields.get(name) or (info or {}).get(name) or {}
    fields.setdefault("index", (info or {}).get("index", 0))
    fields.setdefault("uid", row.id)
    return {**fields, "raw_prompt": [copy_containers(dict(message)) for message in row.messages]}


def _sampling_params(context: RolloutContext) -> dict[str, Any]:
    """verl's sampling parameters with the recipe's values."""
    sampling = context.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _result(output: Any, name: str) -> TokenAgentResult:
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    if not outputs or not all(hasattr(one, "response_mask") for one in outputs):
        raise TypeError(f"{name} must return an AgentLoopOutput or a list of them; it returned {output!r:.80}")
    last = outputs[-1]
    reward = None if last.reward_score is None else reward_number(last.reward_score, f"{name}: reward_score")
    info = {"num_turns": last.num_turns, "metrics": last.metrics.model_dump(), "extra_fields": dict(last.extra_fields)}
    if reward is not None:
        info["reward_score"] = reward
    return TokenAgentResult(reward=reward, info=info, returned=[_returned(one) for one in outputs])


def _returned(output: Any) -> ReturnedSequence:
    return ReturnedSequence(
        prompt_ids=[int(token) for token in output.prompt_ids],
        response_ids=[int(token) for token in output.response_ids],
        mask=[int(weight) for weight in output.response_mask],
        logprobs=output.response_logprobs or None,
    )


class _Node(dict[str, Any]):
    """A mapping whose keys are attributes too, as those of OmegaConf."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"the configuration has no {name!r}: add it to environment.arguments.config")
        return self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Node:
        return _Node({key: copy.deepcopy(value, memo) for key, value in self.items()})


def _as_config(tree: Mapping[str, Any]) -> Any:
    """The configuration as an object of OmegaConf where that is installed (verl's users have it); else of `_Node`."""
    try:
        from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _nodes(tree)
    return OmegaConf.create(copy.deepcopy(dict(tree)))


def _nodes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Node({key: _nodes(item) for key, item in value.items()})
    return [_nodes(item) for item in value] if isinstance(value, list) else value


def _verl_config(config: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(config, str):
        tree, left = resolved(read_mapping(Path(config), what="the configuration"))
        if left:
            raise ConfigError(
                f"environment.arguments.config: {left[0]} cannot be resolved: set the variable that it names"
            )
        return dict(tree)
    return dict(config or {})


def _merged(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        below: Any = tree.get(key)
        both = isinstance(below, dict) and isinstance(value, Mapping)
        tree[key] = _merged(below, value) if both else copy.deepcopy(value)
    return tree


def _defaults(context: RolloutContext) -> dict[str, Any]:
    """The part of verl's configuration that agent loops read, with the values of the recipe."""
    limits, sampling = context.limits, context.sampling
    response = limits.response_tokens or limits.tokens or limits.tokens_per_turn * limits.turns
    if limits.context is not None:
        response = min(response, limits.context)
    prompt = max(1, (limits.context or 1 << 20) - response)
    rollout = {
        "prompt_length": prompt,
        "response_length": response,
        "max_model_len": limits.context,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "calculate_log_probs": True,
        "full_determinism": context.lockstep,
        "multi_turn": {
            "enable": True,
            "max_assistant_turns": limits.turns,
            "max_user_turns": None,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
            "tool_config_path": None,
            "function_tool_path": None,
            "interaction_config_path": None,
        },
        "agent": {"default_agent_loop": "single_turn_agent", "agent_loop_config_path": None},
        "trace": {"backend": None, "token2text": False},
    }
    path = context.renderer.where
    return {
        "actor_rollout_ref": {"rollout": rollout, "model": {"path": path}},
        "data": {
            "max_prompt_length": prompt,
            "max_response_length": response,
            "apply_chat_template_kwargs": dict(context.renderer.template.arguments),
            "mm_processor_kwargs": {},
        },
    }
