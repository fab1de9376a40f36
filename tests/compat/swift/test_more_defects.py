"""The mistakes of ms-swift's multi-turn training (research/ms-swift.md, 2.3), the second half.

What becomes of records, weights and rewards, and of what is switched off without a word.
"""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import RENDERER, STOP, Says, a_row, completion, hold_all, scripted, spoken
from support.swift import ASKED, learnt, made, play, whole
from turnwise.chat.renderer import Renderer
from turnwise.compat.swift.convert import from_swift_arguments
from turnwise.compat.swift.protocol import RolloutOutput
from turnwise.compat.swift.rewards import arguments_of
from turnwise.compat.swift.schedulers import MathTipsScheduler, MultiTurnScheduler, ThinkingModelTipsScheduler
from turnwise.options.algorithm import LossSection
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS
from turnwise.training.batch import pack
from turnwise.types import Group, Request, Stop, Trajectory

TIP = ThinkingModelTipsScheduler.tips_prompt


def more(request: Any, text: str = "More.") -> dict[str, Any]:
    """The next request: a further user message."""
    request.messages.append({"role": "user", "content": text})
    return {"infer_request": request}


@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_tips_work_with_and_without_thoughts_and_leave_former_ones_out(thinks: bool) -> None:
    """Defect 12: without a thinking template texts stood where messages belong, and with one thoughts stayed."""
    thought = "<think>hm</think>\n" if thinks else ""
    engine = Says(thought + "\\boxed{3}", thought + "\\boxed{4}")
    trajectory = whole(play("thinking_tips_scheduler", engine, row=a_row("Hi", solution="4"), max_turns=3))
    assert len(trajectory.turns) == 2
    asked = RENDERER.decode(engine.requests[1].token_ids)
    assert asked == (ASKED + "\\boxed{3}<|im_end|>\n<|im_start|>user\n" + TIP + "<|im_end|>\n<|im_start|>assistant\n")
    # without thoughts nothing is replaced, so the tokens go on; with them a record begins for each turn
    assert len(trajectory.segments) == (2 if thinks else 1)
    said = [part for segment in trajectory.segments for part in spoken(segment) if part[0] >= 0]
    assert said == [(0, thought + "\\boxed{3}<|im_end|>"), (1, thought + "\\boxed{4}<|im_end|>")]


def tipped() -> list[Trajectory]:
    """Four conversations of one row: one is right at once, one at the second try, two never."""
    right, wrong = "<think>a</think>\\boxed{4}", "<think>b</think>\\boxed{3}"
    with made("thinking_tips_scheduler") as make:
        four = hold_all(
            scripted([right], [wrong, right], [wrong, wrong], [wrong, wrong]),
            make,
            size=4,
            row=a_row("Hi", solution="4"),
        )
    for one, reward in zip(four, (1.0, 0.5, 0.0, 0.0), strict=True):
        assert len(whole(one).turns) == len(one.segments)
        one.reward = reward
    return four


def test_a_conversation_of_many_records_weighs_as_much_as_one_of_one() -> None:
    """Defect 13: each record had the whole advantage, so advantages did not add up to zero, and many records weighed more."""
    four = tipped()
    assert [len(one.segments) for one in four] == [1, 2, 2, 2]
    Credit("grpo", grpo)([Group(id="g", row=four[0].row, trajectories=four)])
    assert math.isclose(sum(one.advantages[0] for one in four), 0.0, abs_tol=1e-9)
    # what reaches the loss: of each conversation the same, whatever the number of its records
    weights: dict[float, float] = {}
    for micro in pack(four, loss=LossSection(normalizer="trajectory"), keep_zero=True).micro_batches:
        for advantage, weight in zip(micro.targets.advantage_N, micro.targets.weight_N, strict=True):
            weights[round(float(advantage), 4)] = weights.get(round(float(advantage), 4), 0.0) + float(weight)
    of = {one.reward: round(one.advantages[0], 4) for one in four}
    assert weights == {of[1.0]: pytest.approx(0.25), of[0.5]: pytest.approx(0.25), of[0.0]: pytest.approx(0.5)}


def test_rows_that_read_the_same_are_groups_of_their_own() -> None:
    """Defect 13, the other half: rows of equal text (another image, another game) were one group."""
    from turnwise.rollout.rollout import new_group

    one, other = (new_group(a_row("the same", id=id), size=2, seed=0) for id in ("1", "2"))
    assert (one.id, other.id) == ("1", "2")
    assert [arguments_of(trajectory)[1]["prompt_id"] for trajectory in (*one.trajectories, *other.trajectories)] == [
        ["1"],
        ["1"],
        ["2"],
        ["2"],
    ]


def test_what_is_masked_weighs_nothing_and_nothing_is_corrected_that_needs_no_correction() -> None:
    """Defect 14: masked tokens counted as 1/C in the effective sample size, so half the tokens looked like all."""

    class MasksHalf(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            ids = response_choice.token_ids
            half = len(ids) // 2
            mask = [1] * half + [0] * (len(ids) - half)
            return {**more(infer_request), "response_token_ids": ids, "response_loss_mask": mask}

    trajectory = whole(play(MasksHalf, "abc", "z", max_turns=2))
    trajectory.reward, trajectory.advantages = 1.0, [1.0, 1.0]
    (segment,) = trajectory.segments
    assert (learnt(segment, 0), learnt(segment, 1)) == ([*RENDERER.encode("ab")], [*RENDERER.encode("z"), STOP])
    batch = pack([trajectory])
    assert batch.tokens == 4
    (micro,) = batch.micro_batches
    assert [round(float(weight), 6) for weight in micro.targets.weight_N] == [0.25] * 4
    converted = from_swift_arguments(["--rollout_importance_sampling_mode", "token_mask"])
    (left,) = [left for left in converted.unsupported if left.key == "rollout_importance_sampling_mode"]
    assert "the engine uses the trainer's weights" in left.reason
    assert not left.changes_training


def test_a_thought_that_the_template_opens_is_opened_once_however_often_the_answer_goes_on() -> None:
    """Defect 15: the prefix was put in front of every continuation, in the middle of what reward functions read."""
    template = byte_tokenizer().chat_template.replace(  # type: ignore[union-attr]
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    renderer = Renderer(byte_tokenizer(template))
    engine = scripted(["it is 3", " so 4", " yes.</think>4"], renderer=renderer)

    class Doubts(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages[-1]["content"] += ", wait,"
            return {"infer_request": infer_request}

    trajectory = play(Doubts, engine, max_turns=3, table={"renderer": renderer})
    assert trajectory.error is None, trajectory.error
    completions, _ = arguments_of(trajectory)
    assert completions == ["<think>\nit is 3, wait, so 4, wait, yes.</think>4"]
    text = renderer.decode(trajectory.segments[0].token_ids)
    assert text.count("<think>") == 1


class ReturnsAsTold(MultiTurnScheduler):
    """Returns as many outputs as the model says."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        outputs: list[RolloutOutput] = []
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config)
            text = response.choices[0].message.content
            if text == "none":
                return []
            infer_request.messages.append({"role": "assistant", "content": text})
            outputs.append(RolloutOutput(response=response, messages=list(infer_request.messages)))
            if text == "last":
                return outputs
            infer_request.messages.append({"role": "user", "content": "More."})


def test_records_belong_to_their_own_conversation_whatever_their_number() -> None:
    """Defect 16: conversations of no record and of two were taken for two of one, and the records were mixed up."""
    with made(ReturnsAsTold) as make:
        none, two = hold_all(scripted(["none"], ["first", "last"]), make, size=2)
    assert none.error is not None
    assert none.error.message == (
        "TypeError: ReturnsAsTold.run must return a RolloutOutput or a list of them; it returned []"
    )
    assert whole(two).assistant_texts == ["first", "last"]
    assert [message["content"] for message in two.messages] == ["Hi", "first", "More.", "last"]


def test_the_loop_is_alive_while_a_step_blocks() -> None:
    """Defect 17: the server waited for its workers inside its event loop, so nothing else was answered during a rollout."""
    alive = threading.Event()

    class Blocks(MultiTurnScheduler):
        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            asyncio.get_running_loop().call_later(0.01, alive.set)
            return {}

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {**more(infer_request), "rollout_infos": {"alive": alive.wait(timeout=20)}}

    assert whole(play(Blocks, "a", "b", max_turns=2)).turns[0].info == {"alive": True}


def test_all_tool_calls_of_a_turn_are_answered() -> None:
    """Defect 18: all were run, and only the result of the first was told."""
    said = "Action: calculator\nAction Input: 2+3\nAction: calculator\nAction Input: 4*5\n"
    trajectory = whole(play("tool_call_scheduler", said, " It is 25.", max_turns=3))
    assert trajectory.messages[-1]["content"] == said + "\nObservation: 5\n20\n It is 25."
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, said),
        (-1, "\nObservation: 5\n20\n"),
        (1, " It is 25.<|im_end|>"),
    ]
    assert trajectory.turns[0].info["tool_results"] == ["5", "20"]


def test_a_given_accuracy_function_is_the_one_that_is_asked() -> None:
    """Defect 19: the default was built even where another was given, and needed a package for it."""
    asked: list[tuple[list[str], list[Any]]] = []

    def always_right(completions: list[str], solution: list[Any]) -> list[float]:
        asked.append((completions, solution))
        return [1.0]

    row = a_row("Hi", solution="4")
    trajectory = whole(play("math_tip_trick", "3", row=row, arguments={"acc_function": always_right}))
    assert (trajectory.assistant_texts, asked) == (["3"], [(["3"], ["4"])])
    # without one, wrong answers go on with a doubt, once
    trajectory = whole(play("math_tip_trick", "so <answer>3</answer>", " 4", row=row))
    assert trajectory.messages[-1]["content"] == "so " + MathTipsScheduler.tips_prompt + " 4"


def test_the_loss_is_the_same_whichever_command_names_the_scheduler(tmp_path: Path) -> None:
    """Defect 20: with the scheduler in `swift rollout` only the last turn was trained, because the trainer knew of none."""
    (tmp_path / "server.sh").write_text(
        "swift rollout --model M --multi_turn_scheduler math_tip_trick --max_turns 3\n"
        "swift rlhf --rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 2\n"
    )
    converted = from_swift_arguments([str(tmp_path / "server.sh")])
    assert "loss_mask" not in converted.recipe  # which is `all`
    explicit = from_swift_arguments(["--multi_turn_scheduler", "math_tip_trick", "--loss_scale", "last_round"])
    assert explicit.recipe["loss_mask"] == "last_round"
    # and a run of one's own without masks has all of its turns trained
    trajectory = whole(play(ReturnsAsTold, "first", "last"))
    TURN_WEIGHTINGS["all"](trajectory)
    assert [turn.weight for turn in trajectory.turns] == [1.0, 1.0]
    assert [len(learnt(trajectory.segments[0], n)) for n in range(2)] == [6, 5]


class StopsAtColon(Says):
    """Ends a turn behind a colon, without a stop token: as a stop word does."""

    async def generate(self, request: Request) -> Any:
        said = await super().generate(request)
        ids = list(said.token_ids)
        if RENDERER.decode(ids[:-1]).endswith(":"):
            return completion(ids[:-1])
        return said


def test_an_end_of_turn_that_was_not_sampled_is_not_learnt() -> None:
    """Defect 21: the template's end of turn became a trained token, and the log-probabilities were one too few."""

    class Answers(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return more(infer_request, "42")

    trajectory = whole(play(Answers, StopsAtColon("Observation:", "done"), max_turns=2))
    (segment,) = trajectory.segments
    assert spoken(segment) == [
        (-1, ASKED),
        (0, "Observation:"),
        (-1, "<|im_end|>\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"),
        (1, "done<|im_end|>"),
    ]
    sampled = [logprob for logprob, turn in zip(segment.logprobs, segment.turn, strict=True) if turn == 0]
    assert sampled == [-(n + 1) / 8 for n in range(12)]
    assert trajectory.stop is Stop.DONE
