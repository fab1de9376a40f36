"""`MultiTurnScheduler` with ms-swift's interface, the schedulers that ms-swift provides, and its gym environments.

`ask_scheduler` calls the hooks of a scheduler after a turn of the model. Hooks may be sync or async; sync hooks run in threads,
so that a slow hook does not block other conversations. Provided are: a tip and a second attempt after a wrong answer, tools in
the ReAct format, the gym scheduler with `Env`, `ContextManager` and `math_env`, and `OpenEnvScheduler`: an environment on an
OpenEnv server, which each row names in `env_config`. Does not know turnwise's environments (`environments`)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.compat.swift.outcomes import MathAccuracy
from turnwise.compat.swift.protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    ReturnedTokens,
    RolloutInferRequest,
    RolloutOutput,
    append_answer,
    without_answers,
)
from turnwise.environments.calculator import calculate
from turnwise.errors import ConfigError, nearest
from turnwise.user_code.reward_number import reward_number
from turnwise.user_code.threads import run_in_thread

multi_turns: dict[str, type[Any]] = {}
"""The registry: a plugin adds to it, `name` selects from it."""


class RolloutScheduler:
    """The base class of all schedulers: an engine, a maximum number of turns, hooks."""

    max_turns: int | None = None
    infer_engine: Any = None
    _tokenizer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`(infer_engine, max_turns)`; in older versions of ms-swift `(max_turns)`. An integer is `max_turns` in either place."""
        self.infer_engine = kwargs.get("infer_engine")
        self._tokenizer = kwargs.get("tokenizer")
        self.max_turns = kwargs.get("max_turns")
        for value in args[:2]:
            if isinstance(value, int):
                self.max_turns = value
            elif value is not None:
                self.infer_engine = value

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the constructor received, otherwise the tokenizer of `environment.arguments.tokenizer`."""
        return self._tokenizer if self._tokenizer is not None else self.infer_engine.tokenizer

    @property
    def engine(self) -> Any:
        """Another name of `infer_engine`."""
        return self.infer_engine

    def __getattr__(self, name: str) -> Any:
        """Attributes that the scheduler does not have are looked up in its engine."""
        engine = None if name.startswith("__") else self.__dict__.get("infer_engine")
        if engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(engine, name)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Called before the first turn; it may change the requests in place. The list always has one request here."""

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Called after each turn, including the last. `done` overrides `check_finished`; `rollout_infos` are recorded."""
        return {}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        """Called when the conversation has ended, also after an error. (ms-swift has no such hook.)

        A plugin's copy of ms-swift's gym scheduler has `_close_and_remove(uuid)`, which is called here.
        """
        if callable(close := getattr(type(self), "_close_and_remove", None)):
            await call_hook(close, self, str(infer_request.uuid))

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """One complete conversation. This base class makes one turn."""
        response = await self.infer_engine.infer_async(infer_request, request_config)
        choice = response.choices[0]
        append_answer(infer_request.messages, choice.message.content)
        ids = list(choice.token_ids)
        return RolloutOutput(response, infer_request.messages, [ids], [[1] * len(ids)])

    async def async_infer(self, infer_requests: Any, request_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Not supported: ms-swift passes a batch of conversations, but here each conversation runs alone. Raises RuntimeError."""
        raise RuntimeError(
            "async_infer takes a batch of conversations; here each conversation runs alone, started by the rollout loop"
        )


class MultiTurnScheduler(RolloutScheduler):
    """Decides how a conversation continues after a turn. Subclasses override `step`, and `check_finished` or `run` if needed."""

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """The request of the next turn: `{"infer_request": ...}`. `current_turn` counts from 1.

        The key `request_config` changes `max_tokens` and `stop` of the following turns.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither step nor run")

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the conversation has ended: the turn was truncated, or there were `max_turns` turns."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> RolloutOutput | list[RolloutOutput]:
        """One complete conversation, for subclasses that call `super().run`: calls the same hooks as the rollout loop."""
        await call_hook(self.on_trajectory_start, [infer_request])
        infer_request.messages[:] = without_answers(infer_request.messages)
        infos: dict[str, Any] = {}
        ids: list[list[int]] = []
        mask: list[list[int]] = []
        masked = False
        turn = 1
        while True:
            continues_answer = bool(infer_request.messages) and infer_request.messages[-1]["role"] == "assistant"
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            append_answer(infer_request.messages, choice.message.content)
            decision = await ask_scheduler(self, infer_request, choice, turn)
            infos.update(decision.infos)
            returned = decision.returned
            turn_ids = list(choice.token_ids if returned.ids is None else returned.ids)
            turn_mask = [1] * len(turn_ids) if returned.mask is None else list(returned.mask)
            masked = masked or not returned.without_mask
            if continues_answer and ids:
                ids[-1] += turn_ids
                mask[-1] += turn_mask
            else:
                ids.append(turn_ids)
                mask.append(turn_mask)
            if decision.done:
                infos["num_turns"] = turn
                return RolloutOutput(response, infer_request.messages, ids, mask if masked else [], infos)
            infer_request = decision.request
            request_config = request_config if decision.config is None else decision.config
            turn += 1

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: ChatCompletionResponseChoice) -> list[float]:
        """The log-probabilities of a response, one per item of its `token_ids`."""
        return [float(token["logprob"]) for token in (response_choice.logprobs or {}).get("content") or []]


@dataclass(frozen=True)
class Decision:
    """The decision of a scheduler after a turn."""

    done: bool
    request: RolloutInferRequest
    infos: dict[str, Any]
    returned: ReturnedTokens
    config: RequestConfig | None = None
    """The `request_config` that `step` returned. It holds for the following turns."""


async def ask_scheduler(
    scheduler: Any,
    request: RolloutInferRequest,
    choice: ChatCompletionResponseChoice,
    turn: int,
    *,
    lock: asyncio.Lock | None = None,
) -> Decision:
    """Call a scheduler's hooks after a turn: `on_turn_end`, `check_finished`, and `step` if the conversation continues.

    `lock` is held during sync hooks. Raises TypeError if a hook returns a value of a wrong type.
    """
    hooked = await call_hook(scheduler.on_turn_end, request, choice, turn, lock=lock)
    hooked = _dictionary(hooked if hooked is not None else {}, scheduler, "on_turn_end")
    finished = await call_hook(scheduler.check_finished, request, choice, turn, lock=lock)
    done = bool(hooked.get("done", finished) or (scheduler.max_turns and turn >= scheduler.max_turns))
    infos = dict(hooked.get("rollout_infos") or {})
    if done:
        return Decision(True, request, infos, ReturnedTokens.of(hooked))
    result = await call_hook(scheduler.step, request, choice, turn, lock=lock)
    # before version 3.8, step returned the request; in 3.7 also the request with a dictionary
    if isinstance(result, RolloutInferRequest):
        result = {"infer_request": result}
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], RolloutInferRequest):
        result = {"infer_request": result[0], "rollout_infos": result[1]}
    result = _dictionary(result, scheduler, "step")
    following = result.get("infer_request")
    if not isinstance(following, RolloutInferRequest):
        raise TypeError(
            f"{type(scheduler).__name__}.step must return {{'infer_request': RolloutInferRequest, ...}}; its infer_request is "
            f"{following!r:.80}"
        )
    infos.update(result.get("rollout_infos") or {})
    returned = ReturnedTokens.of(result)
    returned = ReturnedTokens.of(hooked) if returned.empty else returned
    return Decision(False, following, infos, returned, result.get("request_config"))


async def call_hook(function: Callable[..., Any], *arguments: Any, lock: asyncio.Lock | None = None) -> Any:
    """Call a hook: an async hook in this task, a sync hook in a thread, while `lock` is held."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    async with lock or contextlib.nullcontext():
        result = await run_in_thread(
            lambda: function(*arguments), name=getattr(function, "__name__", "hook"), kind="environment"
        )
    return await result if inspect.isawaitable(result) else result


def _dictionary(result: Any, scheduler: Any, hook: str) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise TypeError(f"{type(scheduler).__name__}.{hook} must return a dictionary; it returned {result!r:.80}")
    return result


class Env(ABC):
    """An environment of one conversation. The methods may be sync or async."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Returns the first observation, a dictionary of information, and a system message (or an empty text)."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Returns the next observation, the reward, whether the episode has ended, and a dictionary of information.

        `action` is the list of all messages so far.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources."""


class ContextManager(ABC):
    """Decides which messages the model sees before its next turn."""

    def __init__(self, ctx_config: dict[str, Any]) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Returns the messages that replace the history."""


class DummyContextManager(ContextManager):
    """Changes nothing."""

    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        return history


envs: dict[str, type[Any]] = {}
"""The registry of environments. Plugins add to it; `env_config.name` of a row, or `gym_env`, selects from it."""

context_managers: dict[str, type[Any]] = {"dummyContextManager": DummyContextManager}
"""The registry of context managers. `ctx_config.name` of a row, or `context_manager`, selects from it."""


class GYMScheduler(MultiTurnScheduler):
    """Passes each turn of the model to an environment as an action; the observation is the next user message.

    `rollout_infos` has `total_reward`, `step_rewards`, `gym_done` and the `env_info` of the last step.
    """

    def __init__(
        self,
        infer_engine: Any = None,
        max_turns: int | None = None,
        use_gym_env: bool = True,
        gym_env: str | None = None,
        context_manager_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.gym_env_name = gym_env
        self.context_manager_name = context_manager_name
        # the state of each episode, by the `uuid` of its request; subclasses read and write these dictionaries
        self._envs: dict[str, Any] = {}
        self._managers: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, Any] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return registered(envs, env_config.get("name") or self.gym_env_name, "environment", "gym_env")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return registered(context_managers, name, "context manager", "context_manager")(ctx_config)

    async def _close_and_remove(self, uuid: str) -> None:
        """Close a game and forget it; there may be none any more."""
        for kept in (self._managers, self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if (env := self._envs.pop(uuid, None)) is not None:
            await call_hook(env.close)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            key = _key(request)
            self._managers[key] = await _awaited(
                self._create_context_manager(dict(request.data_dict.get("ctx_config") or {}))
            )
            env = self._envs[key] = await _awaited(self._create_env(dict(request.data_dict.get("env_config") or {})))
            self._total_rewards[key], self._step_rewards[key], self._pending_obs[key] = 0.0, [], None
            observation, _, system = await call_hook(env.reset, request)
            head: Messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*head, {"role": "user", "content": observation}]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = _key(infer_request)
        if key not in self._envs:  # closed by a subclass
            return {"done": True}
        observation, reward, done, info = await call_hook(self._envs[key].step, list(infer_request.messages))
        infos = self._paid(key, reward_number(reward, f"{type(self._envs[key]).__name__}.step"), done=bool(done))
        self._pending_obs[key] = observation
        return {"done": bool(done), "rollout_infos": {**infos, "env_info": info}}

    def _paid(self, key: str, reward: float, *, done: bool) -> dict[str, Any]:
        """Add the reward of a step. Returns the `rollout_infos` of the step."""
        self._total_rewards[key] = self._total_rewards.get(key, 0.0) + reward
        rewards = self._step_rewards.setdefault(key, [])
        rewards.append(reward)
        return {"total_reward": self._total_rewards[key], "step_rewards": list(rewards), "gym_done": done}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = _key(infer_request)
        if (observation := self._pending_obs.pop(key, None)) is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        if (manager := self._managers.get(key)) is not None:
            infer_request.messages = manager.manage_context(infer_request.messages, key)
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        await self._close_and_remove(_key(infer_request))


multi_turns["gym_scheduler"] = GYMScheduler


async def _awaited(value: Any) -> Any:
    """The value, or the result of an awaitable: older versions of ms-swift make environments in coroutines."""
    return await value if inspect.isawaitable(value) else value


def _key(request: RolloutInferRequest) -> str:
    return str(request.uuid)


def registered(registry: dict[str, type[Any]], name: str | None, what: str, argument: str) -> type[Any]:
    """The class with a name in a registry. `argument` is the argument of the recipe that names it. Raises ConfigError."""
    if name is None:
        raise ConfigError(f"neither the row nor environment.arguments.{argument} names the {what}; set one of them")
    if name not in registry:
        have = ", ".join(sorted(registry)) or "none"
        raise ConfigError(
            f"there is no {what} {name!r}{nearest(name, registry)}; registered are: {have}. A plugin registers one, and "
            f"environment.arguments.external_plugins names the plugin"
        )
    return registry[name]


_THOUGHT = re.compile(r"^.*?</think>\s*", re.DOTALL)
_ACTION = re.compile(r"Action:[ \t]*([^\n]+?)[ \t]*\nAction Input:[ \t]*([^\n]*)")


class SimpleMathEnv(Env):
    """ms-swift's `math_env`: asks the row's `problem` (without it, the last message), and says that an answer is wrong until it
    equals the row's `solution`.

    A right answer has the reward 1 and ends the conversation. ms-swift's class also ends it when the messages have 2,048 tokens
    of Qwen2.5's tokenizer; here `limits.context` and `limits.tokens` do.
    """

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    system_prompt = (
        "A conversation between User and Assistant.\n"
        "        The user asks a question, and the Assistant solves it.\n"
        "        The assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        "        The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags,\n"
        "        respectively, i.e., <think> reasoning process here </think><answer> answer here </answer>\n"
        "        "
    )
    """With the blanks of ms-swift's text, which are part of the prompt."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self.acc_func = MathAccuracy()
        self.solution: Any = ""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        columns = config.data_dict
        if columns.get("solution") is None:
            have = ", ".join(sorted(columns)) or "none"
            raise ValueError(
                f"math_env needs the column solution, and the row has none; its columns are: {have}. Map another column to it: "
                f"data.columns.solution=<column>"
            )
        self.solution = columns["solution"]
        return columns.get("problem") or config.messages[-1]["content"], {}, self.system_prompt

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        right = self.acc_func([action[-1]["content"]], [self.solution])[0] == 1
        info = {"math_reward": float(right), **({"stop_reason": "Correct"} if right else {})}
        return self.tips_prompt, float(right), right, info

    async def close(self) -> None:
        pass


envs["math_env"] = SimpleMathEnv


class ThinkingModelTipsScheduler(MultiTurnScheduler):
    """Says once to a reasoning model that its answer is wrong. The reasoning of earlier turns is removed from the history.

    Each turn is a training record, and `run` returns one output for each turn.
    """

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."

    def __init__(self, *args: Any, acc_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        messages = infer_request.messages
        if any(message["role"] == "user" and message["content"] == self.tips_prompt for message in messages):
            return True
        if self.acc_func([messages[-1]["content"]], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        history = [
            {**message, "content": _THOUGHT.sub("", message["content"])} if message["role"] == "assistant" else message
            for message in infer_request.messages
        ]
        infer_request.messages = [*history, {"role": "user", "content": self.tips_prompt}]
        return {"infer_request": infer_request}

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> list[RolloutOutput]:
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            messages = copy.deepcopy(infer_request.messages)
            decision = await ask_scheduler(self, infer_request, choice, len(outputs) + 1)
            ids: list[int] = list(choice.token_ids or ())
            infos = {**decision.infos, "num_turns": len(outputs) + 1}
            outputs.append(RolloutOutput(response, messages, [ids], [[1] * len(ids)], infos))
            if decision.done:
                return outputs
            infer_request = decision.request
            request_config = request_config if decision.config is None else decision.config


class MathTipsScheduler(MultiTurnScheduler):
    """Cuts a wrong answer before its conclusion and appends `tips_prompt`; the model continues from there. Once only."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, acc_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        answer = infer_request.messages[-1]["content"]
        if self.tips_prompt in answer or self.acc_func([answer], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        message = infer_request.messages[-1]
        kept = message["content"]
        for mark in ("<answer>", "</think>"):
            kept = kept.partition(mark)[0]
        message["content"] = kept + self.tips_prompt
        return {"infer_request": infer_request}


class MathTipsMultiTurnScheduler(MultiTurnScheduler):
    """Adds a user message after a wrong answer, once."""

    tips_prompt = ThinkingModelTipsScheduler.tips_prompt

    def __init__(self, *args: Any, acc_function: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        tip_given = any(message["content"] == self.tips_prompt for message in infer_request.messages)
        answer = infer_request.messages[-1]["content"]
        if tip_given or self.acc_func([answer], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class ToolCallScheduler(MultiTurnScheduler):
    """Tools in the ReAct format: `Action: name`, `Action Input: text`. Results are appended to the model's answer.

    All calls of a turn are run in order. Sampling should stop at `Observation:`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tools: dict[str, Any] = {"calculator": calculate}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        if not _ACTION.search(response_choice.message.content or ""):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        results = [self._result(name, text) for name, text in _ACTION.findall(response_choice.message.content or "")]
        message = infer_request.messages[-1]
        mark = "" if message["content"].rstrip().endswith("Observation:") else "\nObservation:"
        message["content"] += f"{mark} " + "\n".join(results) + "\n"
        return {"infer_request": infer_request, "rollout_infos": {"tool_results": results, "num_turns": current_turn}}

    def _result(self, name: str, text: str) -> str:
        if name not in self.tools:
            return f"there is no tool {name!r}; the tools are: {', '.join(sorted(self.tools))}"
        try:
            return str(self.tools[name](text.strip()))
        except (ValueError, ArithmeticError, TypeError) as error:
            return f"{type(error).__name__}: {error}"


multi_turns["base_scheduler"] = RolloutScheduler
multi_turns["thinking_tips_scheduler"] = ThinkingModelTipsScheduler
multi_turns["math_tip_trick"] = MathTipsScheduler
multi_turns["math_tip_trick_multi_turn"] = MathTipsMultiTurnScheduler
multi_turns["tool_call_scheduler"] = ToolCallScheduler


_TRIES = 3
_PAUSE = 2.0
"""Seconds before the second try. Before the third try it is twice this time."""
_BROKEN = (OSError, RuntimeError, TimeoutError)
"""Exceptions that a client raises if its connection is lost. Any other exception is an error of the environment."""


class OpenEnvWrapper:
    """A connection to an environment of an OpenEnv server. All methods block.

    `env_config`: `base_url` of the server (default `http://localhost:8000`), `reset_kwargs` for `reset`.
    """

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = str(env_config.get("base_url") or "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Returns the first observation and its metadata. Tries again if the server is not reachable yet."""
        for attempt in range(1, _TRIES):
            try:
                return self._first()
            except _BROKEN:
                self.close()
                time.sleep(_PAUSE * attempt)
        return self._first()

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Returns the next observation, the reward, whether the episode has ended, and metadata.

        A failed step is not tried again, because a new connection would start a new episode.
        """
        result = self._connected().step(action_dict)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*_BROKEN):  # the connection may be lost already
                client.__exit__(None, None, None)

    def _first(self) -> tuple[Any, Any]:
        result = self._connected().reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def _connected(self) -> Any:
        if self._client is None:
            try:
                from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise ConfigError(
                    f"openenv_scheduler needs the client of OpenEnv, which cannot be imported ({error}): "
                    f"pip install openenv-core"
                ) from error
            client = GenericEnvClient(base_url=self.base_url).sync()
            client.__enter__()
            self._client = client
        return self._client


class OpenEnvScheduler(GYMScheduler):
    """Uses an environment on an OpenEnv server. A row's `env_config` has `base_url`, `system_message`, `reset_kwargs`.

    Subclasses may override `parse_action` (turn to action) and `format_observation` (observation to text).
    """

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            key = str(request.uuid)
            config = {**getattr(self, "env_config_defaults", {}), **(request.data_dict.get("env_config") or {})}
            env = self._envs[key] = self._create_env(config)
            self._total_rewards[key], self._step_rewards[key], self._pending_obs[key] = 0.0, [], None
            observation, _ = await call_hook(env.reset)
            system = config.get("system_message")
            head: Messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*head, {"role": "user", "content": self.format_observation(observation)}]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = str(infer_request.uuid)
        if key not in self._envs:  # closed by a subclass
            return {"done": True}
        action = self.parse_action(response_choice.message.content or "")
        observation, reward, done, _ = await call_hook(self._envs[key].step, action)
        self._pending_obs[key] = None if done else self.format_observation(observation)
        return {"done": bool(done), "rollout_infos": self._paid(key, float(reward or 0.0), done=bool(done))}

    def parse_action(self, text: str) -> dict[str, Any]:
        """The action in an answer: a JSON object, optionally in a code block. Any other text is `{"message": text}`."""
        text = text.strip()
        lines = text.splitlines()
        if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
            text = "\n".join(lines[1:-1]).strip()
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            return {"message": text}
        return action if isinstance(action, dict) else {"message": str(action)}

    def format_observation(self, observation: Any) -> str:
        """The text of an observation: JSON."""
        return json.dumps(observation, ensure_ascii=False, default=str)


multi_turns["openenv_scheduler"] = OpenEnvScheduler
