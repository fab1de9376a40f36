"""The mistakes of ms-swift's multi-turn training (research/ms-swift.md, 2.3), each as the rule that holds here instead.

The first half: what is trained on, what hooks see, what a failure costs.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from support.conversations import RENDERER, STOP, Says, a_row, hold_all, scripted, spoken
from support.swift import ASKED, learnt, made, play, whole
from turnwise.compat.swift.rewards import ORM, call_reward_once
from turnwise.compat.swift.schedulers import Env, MultiTurnScheduler, envs
from turnwise.rollout.context import Limits
from turnwise.types import Stop


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
