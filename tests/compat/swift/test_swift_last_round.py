"""`loss_scale last_round`: which turns are learnt from, and which records a reward function is handed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from support.conversations import a_row
from support.swift import learnt, play, whole
from turnwise.assembly import turn_weighting
from turnwise.commands.convert import converted
from turnwise.compat.swift.protocol import RolloutOutput
from turnwise.compat.swift.rewards import arguments_of
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.config.recipe import load
from turnwise.types import Trajectory

SCRIPT = """
swift rollout --model Qwen/Qwen3-1.7B --use_async_engine true --multi_turn_scheduler thinking_tips_scheduler \\
    --vllm_max_model_len 32768 --vllm_gpu_memory_utilization 0.8 --max_turns 3
swift rlhf --rlhf_type grpo --model Qwen/Qwen3-1.7B --tuner_type full --dataset AI-MO/NuminaMath-TIR#5000 \\
    --loss_scale last_round --use_vllm true --vllm_mode server --max_steps 10 --reward_funcs accuracy
"""
"""Document 2's commands."""

TIP = "Wrong, try again."


class Records(MultiTurnScheduler):
    """A record for each turn, as thinking schedulers have it: the history without the thoughts of earlier answers."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})
            inputs = type("Inputs", (), {"messages": copy.deepcopy(infer_request.messages)})()
            self.infer_engine.template._swift_prepare_inputs(inputs)
            infos = {"num_turns": len(outputs) + 1}
            outputs.append(
                RolloutOutput(
                    response, messages=inputs.messages, response_token_ids=choice.token_ids, rollout_infos=infos
                )
            )
            if len(outputs) == self.max_turns:
                return outputs
            infer_request.messages.append({"role": "user", "content": TIP})


def weighed(trajectory: Trajectory, tmp_path: Path) -> list[float]:
    """The weights of the turns by the recipe that document 2's script becomes."""
    script, recipe = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    script.write_text(SCRIPT)
    from turnwise.commands.convert import as_recipe

    recipe.write_text(as_recipe(converted("swift", [str(script)])))
    config, _ = load(recipe)
    turn_weighting(config)(trajectory)
    return [turn.weight for turn in trajectory.turns]


@pytest.mark.parametrize("kind", ["thinking_tips_scheduler", Records])
@pytest.mark.parametrize("thought", ["<think>Hm.</think> ", ""])
def test_document_2s_script_learns_from_the_last_round_of_each_record(kind: Any, thought: str, tmp_path: Path) -> None:
    row = a_row("2 + 2?", solution="\\boxed{4}")
    trajectory = whole(play(kind, f"{thought}\\boxed{{5}}", f"{thought}\\boxed{{4}}", row=row, max_turns=2))
    assert weighed(trajectory, tmp_path) == [1, 1]
    for turn in trajectory.turns:
        assert turn.completion is not None
        sampled = [learnt(segment, turn.index) for segment in trajectory.segments]
        assert [ids for ids in sampled if ids] == [list(turn.completion.token_ids)]


@pytest.mark.parametrize("kind", ["thinking_tips_scheduler", Records])
@pytest.mark.parametrize("thought", ["<think>Hm.</think> ", ""])
def test_a_reward_is_handed_each_record(kind: Any, thought: str) -> None:
    row = a_row("2 + 2?", solution="\\boxed{4}")
    trajectory = whole(play(kind, f"{thought}\\boxed{{5}}", f"{thought}\\boxed{{4}}", row=row, max_turns=2))
    completions, columns = arguments_of(trajectory)
    (records,) = columns["trajectory_inputs"].values()  # type: ignore[attr-defined]
    first, second = ([message["content"] for message in record["messages"]] for record in records)
    assert first == ["2 + 2?", f"{thought}\\boxed{{5}}"]
    assert second[:2] == ["2 + 2?", "\\boxed{5}"]
    assert second[3:] == completions == [f"{thought}\\boxed{{4}}"]
    assert columns["rollout_infos"] == [{"num_turns": 2}]


class Steps(MultiTurnScheduler):
    """Steps that say what of the first answer is learnt from, or do not."""

    masks = True

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": TIP})
        ids = response_choice.token_ids
        mask = {"response_loss_mask": [1] * (len(ids) - 1) + [0]} if self.masks else {}
        return {"infer_request": infer_request, "response_token_ids": ids, **mask}


def test_loss_scale_is_ignored_where_there_is_a_loss_mask(tmp_path: Path) -> None:
    assert weighed(whole(play(Steps, "a", "b", max_turns=2)), tmp_path) == [1, 1]
    without = type("Without", (Steps,), {"masks": False})
    assert weighed(whole(play(without, "a", "b", max_turns=2)), tmp_path) == [0, 1]

    class Run(Steps):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            return await super().run(infer_request, request_config, **kwargs)

    assert weighed(whole(play(Run, "a", "b", max_turns=2)), tmp_path) == [1, 1]
    without = type("Without", (Run,), {"masks": False})
    assert weighed(whole(play(without, "a", "b", max_turns=2)), tmp_path) == [0, 1]
