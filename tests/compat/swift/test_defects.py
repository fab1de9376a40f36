"""The mistakes of ms-swift's multi-turn training (research/ms-swift.md, 2.3), each as the rule that holds here instead."""

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
from turnwise.compat.swift.rewards import ORM, arguments_of, call_reward_once
from turnwise.compat.swift.schedulers import (
    Env,
    MathTipsScheduler,
    MultiTurnScheduler,
    ThinkingModelTipsScheduler,
    envs,
)
from turnwise.options.algorithm import LossSection
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS
from turnwise.rollout.context import Limits
from turnwise.training.batch import pack
from turnwise.types import Group, Request, Stop, Trajectory

# The mistakes of ms-swift's multi-turn training (research/ms-swift.md, 2.3), each as the rule that holds here
# instead.


def more(request: Any, text: str = "More.") -> dict[str, Any]:
    """The next request: a further user message."""
    request.messages.append({"role": "user", "content": text})
    return {"infer_request": request}


class GivesIds(MultiTurnScheduler):
    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        ids = response_choice.token_ids
        return {**more(infer_request), "response_token_ids": ids, "response_loss_mask": [1] * len(ids)}


def test_each_turn_is_trained_on_its_own_tokens_where_step_returns_ids() -> None:
    """Defect 1: the last turn's ids were lost, and the others were trained as the turn after their own."""
    trajectory = whole(play(GivesIds, "a1", "b22", "c333", max_turns=3))
    (segment,) = trajectory.segments
    between = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
    assert spoken(segment) == [
        (-1, ASKED),
        (0, "a1<|im_end|>"),
        (-1, between),
        (1, "b22<|im_end|>"),
        (-1, between),
        (2, "c333<|im_end|>"),
    ]
    assert [learnt(segment, n) for n in range(3)] == [[*RENDERER.encode(text), STOP] for text in ("a1", "b22", "c333")]


class AddsObservation(MultiTurnScheduler):
    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        answer = infer_request.messages[-1]
        answer["content"] = answer["content"].split("!")[0] + " [42]"
        return {"infer_request": infer_request}


def test_an_edit_of_the_answer_without_ids_is_in_the_next_prompt_and_not_learnt() -> None:
    """Defect 2: the edit was thrown away without a word, so the model never saw the observation."""
    engine = Says("look! at this", " so 42")
    trajectory = whole(play(AddsObservation, engine, max_turns=2))
    assert RENDERER.decode(engine.requests[1].token_ids) == ASKED + "look [42]"
    assert spoken(trajectory.segments[0]) == [(-1, ASKED), (0, "look"), (-1, " [42]"), (1, " so 42<|im_end|>")]
    assert trajectory.messages[-1]["content"] == "look [42] so 42"


def test_a_reward_function_reads_text_in_every_message_of_every_record() -> None:
    """Defect 3: all assistant messages but the last were lists of integers to reward functions."""
    seen: dict[str, Any] = {}

    class Reads(ORM):
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
            seen.update(kwargs, completions=completions)
            return [0.5]

    trajectory = whole(play(GivesIds, "one", "two", "three", max_turns=3))
    assert asyncio.run(call_reward_once(Reads(), trajectory, "reads")) == 0.5
    assert seen["completions"] == ["three"]
    told = ["Hi", "one", "More.", "two", "More.", "three"]
    assert [message["content"] for message in seen["messages"][0]] == told
    (records,) = seen["trajectory_inputs"].values()
    assert [[message["content"] for message in record["messages"]] for record in records] == [told]


class LooksAtHistory(MultiTurnScheduler):
    seen: list[tuple[str, list[str]]]

    def _look(self, hook: str, request: Any) -> None:
        self.seen.append((hook, [message["content"] for message in request.messages]))

    async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self._look("on_turn_end", infer_request)
        if current_turn == 2:  # an edit of an earlier answer, in a list of its own
            first, *rest = [dict(message) for message in infer_request.messages[1:]]
            infer_request.messages = [infer_request.messages[0], {**first, "content": "(shortened)"}, *rest]
        return {}

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        self._look("check_finished", infer_request)
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        self._look("step", infer_request)
        return more(infer_request)


def test_all_hooks_see_the_same_text_and_what_they_edit_stays_edited() -> None:
    """Defect 4: step saw integers where the others saw text, and edits of earlier answers were reverted."""
    LooksAtHistory.seen = []
    engine = Says("one", "two", "three")
    trajectory = whole(play(LooksAtHistory, engine, max_turns=3))
    of_first = [told for _, told in LooksAtHistory.seen[:3]]
    assert of_first == [["Hi", "one"]] * 3
    assert LooksAtHistory.seen[3] == ("on_turn_end", ["Hi", "one", "More.", "two"])
    assert LooksAtHistory.seen[5] == ("step", ["Hi", "(shortened)", "More.", "two"])
    # another history is another segment; what was said is trained on once
    assert [message["content"] for message in trajectory.messages] == [
        "Hi",
        "(shortened)",
        "More.",
        "two",
        "More.",
        "three",
    ]
    assert "(shortened)" in RENDERER.decode(engine.requests[2].token_ids)
    turns = [[turn for turn, _ in spoken(segment) if turn >= 0] for segment in trajectory.segments]
    assert turns == [[0, 1], [2]]


class Prefills(MultiTurnScheduler):
    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        more(infer_request)
        infer_request.messages.append({"role": "assistant", "content": "Prefill:"})
        return {"infer_request": infer_request}


def test_an_answer_that_step_begins_stays_as_it_was_begun() -> None:
    """Defect 5: it was overwritten with the tokens of the turn before."""
    trajectory = whole(play(Prefills, "first", " second", max_turns=2))
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "first<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\nPrefill:"),
        (1, " second<|im_end|>"),
    ]
    assert [message["content"] for message in trajectory.messages] == ["Hi", "first", "More.", "Prefill: second"]


class Counts(Env):
    """Counts how many of it are open."""

    opened = 0
    closed = 0
    moves: list[str]
    breaks: str | None = None

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        type(self).opened += 1
        return f"Begin {config.data_dict['n']}.", {}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        said = action[-1]["content"]
        self.moves.append(said)
        if said == self.breaks:
            raise RuntimeError("the game is gone")
        return "Go on.", 0.25, False, {}

    async def close(self) -> None:
        type(self).closed += 1


def counting(breaks: str | None = None) -> type[Counts]:
    kind = type("Counting", (Counts,), {"opened": 0, "closed": 0, "moves": [], "breaks": breaks})
    envs["counts"] = kind
    return kind


def test_what_breaks_in_one_conversation_breaks_no_other_and_all_games_are_closed() -> None:
    """Defect 6: one exception failed the whole batch, ended the training and left every environment open."""
    kind = counting(breaks="bad")
    engine = scripted(["good", "good"], ["bad"], ["good", "good"], ["good", "good"])
    with made("gym_scheduler", gym_env="counts", max_turns=2) as make:
        four = hold_all(engine, make, size=4, row=a_row(n=1))
    assert [one.stop for one in four] == [Stop.DONE, Stop.ERROR, Stop.DONE, Stop.DONE]
    assert four[1].error is not None
    assert (four[1].error.kind, four[1].error.message) == ("environment", "RuntimeError: the game is gone")
    assert [len(one.turns) for one in four] == [2, 1, 2, 2]
    assert (kind.opened, kind.closed) == (4, 4)


def test_a_game_is_closed_when_the_turns_are_over() -> None:
    """Defect 7: an environment that was stopped by max_turns was never closed."""
    kind = counting()
    trajectory = whole(play("gym_scheduler", "a", "b", row=a_row(n=1), gym_env="counts", max_turns=2))
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.DONE, 2)
    assert (kind.opened, kind.closed) == (1, 1)
    kind = counting()  # and by the loop's own bound, which the scheduler does not know of
    play("gym_scheduler", "a", "b", row=a_row(n=1), gym_env="counts", table={"limits": Limits(turns=1)})
    assert (kind.opened, kind.closed) == (1, 1)


def test_an_answer_that_was_cut_ends_the_game_and_is_no_move() -> None:
    """Defect 8: `done=False` of a game overrode the cut, and cut answers were played on and on."""
    kind = counting()
    limits = Limits(turns=8, tokens_per_turn=5)
    trajectory = play("gym_scheduler", "a", "far too long", row=a_row(n=1), gym_env="counts", table={"limits": limits})
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.LENGTH, 2)
    assert kind.moves == ["a"]
    assert (kind.opened, kind.closed) == (1, 1)
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0]


def test_steps_that_block_wait_together_and_not_one_after_the_other() -> None:
    """Defect 9: a sync step blocked the event loop, so eight tools of 0.2 s took 1.6 s."""
    together = threading.Barrier(8, timeout=20)  # opens when all eight are inside; breaks otherwise

    class Blocks(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            together.wait()
            return more(infer_request)

    with made(Blocks, max_turns=2) as make:
        eight = hold_all(Says("a", "b"), make, size=8)
    assert [(one.stop, len(one.turns)) for one in eight] == [(Stop.DONE, 2)] * 8


def test_hooks_may_be_async() -> None:
    """Defect 9, the other half: `async def step` failed with a message about coroutines."""

    class Waits(MultiTurnScheduler):
        async def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:  # type: ignore[override]
            await asyncio.sleep(0)
            return current_turn == 2

        async def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:  # type: ignore[override]
            await asyncio.sleep(0)
            return {**more(infer_request), "rollout_infos": {"waited": current_turn}}

    trajectory = whole(play(Waits, "a", "b"))
    assert [turn.info for turn in trajectory.turns] == [{"waited": 1}, {}]


def test_a_slow_conversation_holds_up_no_other() -> None:
    """Defect 10: turns of all conversations began together, so all waited for the slowest."""
    others = threading.Semaphore(0)

    class OneIsSlow(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            if response_choice.message.content == "slow":  # until the others have taken all their turns
                for _ in range(3):
                    assert others.acquire(timeout=20)
            return more(infer_request)

        async def on_trajectory_end(self, infer_request: Any) -> None:
            others.release()

    with made(OneIsSlow, max_turns=3) as make:
        four = hold_all(scripted(["slow", "b", "c"], *[["a", "b", "c"]] * 3), make, size=4)
    assert [len(one.turns) for one in four] == [3, 3, 3, 3]
    assert [one.error for one in four] == [None] * 4


class PrefillsAndGivesIds(Prefills):
    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        ids = response_choice.token_ids
        return {
            **super().step(infer_request, response_choice, current_turn),
            "response_token_ids": ids,
            "response_loss_mask": [1] * len(ids),
        }


def test_there_is_one_loop_and_a_prefix_is_context_in_every_turn_of_it() -> None:
    """Defect 11: the server left a prefix out of turns but the last, the trainer's own loop did not."""
    made_by: list[list[tuple[int, str]]] = []
    for lockstep in (False, True):
        with made(PrefillsAndGivesIds, max_turns=3) as make:
            one, other = hold_all(Says("a", "b", "c"), make, size=2, lockstep=lockstep)
        assert spoken(one.segments[0]) == spoken(other.segments[0])
        made_by.append(spoken(whole(one).segments[0]))
    begun = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\nPrefill:"
    assert made_by[0] == made_by[1]
    assert made_by[0] == [
        (-1, ASKED),
        (0, "a<|im_end|>"),
        (-1, begun),
        (1, "b<|im_end|>"),
        (-1, begun),
        (2, "c<|im_end|>"),
    ]


# The mistakes of ms-swift's multi-turn training (research/ms-swift.md, 2.3), the second half.


TIP = ThinkingModelTipsScheduler.tips_prompt


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
