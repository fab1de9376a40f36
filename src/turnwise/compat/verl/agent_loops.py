"""Runs verl's agent loops: programs of the user that lead a conversation with token ids.

`AgentLoops` reads the classes once per run, from verl's `agent_loop_config_path` and from Python files with `@register`. Rows
select one by the column `agent_name`. A loop runs beside the rollout loop (`environments.agents.token_agent`): each `generate`
is one turn, and what the loop returns is compared with what was sampled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.compat.token_prompts import TokenPrompts
from turnwise.compat.verl.agent_loop import DictConfigWrap, LLMServerClient, ToolListWrap, registered
from turnwise.compat.verl.calls import call, takes
from turnwise.compat.verl.files import load_class
from turnwise.compat.verl.names import verl_names
from turnwise.compat.yaml_files import read_list, read_mapping, resolved
from turnwise.environments.agents.token_agent import TokenAgentEnvironment, TokenAgentResult, TokenModel
from turnwise.environments.agents.token_histories import ReturnedSequence
from turnwise.environments.tools.tool import copy_containers
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.rollout.context import RolloutContext
from turnwise.types import Failure, Row
from turnwise.user_code.object_references import load_file
from turnwise.user_code.reward_number import reward_number

__all__ = ["AgentLoops", "read_agent_loops"]

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
    reward = 0.0 if last.reward_score is None else reward_number(last.reward_score, f"{name}: reward_score")
    info = {"num_turns": last.num_turns, "metrics": last.metrics.model_dump(), "extra_fields": dict(last.extra_fields)}
    if last.reward_score is not None:
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
