"""What ms-swift provides: schedulers (a tip and a second attempt after a wrong answer; tools in the ReAct format), and the gym
environment `math_env`."""

from __future__ import annotations

import copy
import re
from typing import Any

from turnwise.compat.swift.gym import Env, envs
from turnwise.compat.swift.outcomes import MathAccuracy
from turnwise.compat.swift.protocol import (
    ChatCompletionResponseChoice,
    Messages,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
)
from turnwise.compat.swift.scheduler import MultiTurnScheduler, RolloutScheduler, ask_scheduler, multi_turns
from turnwise.environments.calculator import calculate

__all__ = [
    "MathTipsMultiTurnScheduler",
    "MathTipsScheduler",
    "SimpleMathEnv",
    "ThinkingModelTipsScheduler",
    "ToolCallScheduler",
]

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
