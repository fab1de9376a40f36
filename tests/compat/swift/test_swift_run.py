"""Schedulers with a `run` of their own, gym environments, images, and schedulers written against what ms-swift's own have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import RENDERER, Says, a_row, hold_all, scripted, spoken
from support.swift import ASKED, learnt, made, play, whole
from turnwise.compat.swift.protocol import RequestConfig, RolloutOutput
from turnwise.compat.swift.schedulers import (
    ContextManager,
    Env,
    GYMScheduler,
    MultiTurnScheduler,
    OpenEnvScheduler,
    OpenEnvWrapper,
    RolloutScheduler,
    context_managers,
    envs,
)
from turnwise.rollout.context import Limits
from turnwise.types import Stop

# Schedulers with a `run` of their own, gym environments, images: flows that are not step by step.


class Twice(MultiTurnScheduler):
    """Asks, asks again about a new history, and returns one output for each."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> list[RolloutOutput]:
        first = await self.infer_engine.infer_async(infer_request, request_config)
        text = first.choices[0].message.content
        told = [*infer_request.messages, {"role": "assistant", "content": text}]
        again = [{"role": "user", "content": f"You said {text}. Sure?"}]
        infer_request.messages = again
        second = await self.infer_engine.infer_async(infer_request, request_config)
        answer = {"role": "assistant", "content": second.choices[0].message.content}
        return [
            RolloutOutput(first, told, first.choices[0].token_ids, rollout_infos={"first": text}),
            RolloutOutput(second, [*again, answer], second.choices[0].token_ids, rollout_infos={"n": 2}),
        ]


@pytest.mark.usefixtures("games")
def test_a_run_of_its_own_asks_the_loop_and_each_history_is_a_segment() -> None:
    trajectory = whole(play(Twice, "4", "yes"))
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "4<|im_end|>")],
        [(-1, "<|im_start|>user\nYou said 4. Sure?<|im_end|>\n<|im_start|>assistant\n"), (1, "yes<|im_end|>")],
    ]
    assert trajectory.turns[1].info == {"first": "4", "n": 2}
    assert (trajectory.stop, trajectory.messages[-1]["content"]) == (Stop.DONE, "yes")


@pytest.mark.usefixtures("games")
def test_masks_of_run_say_what_is_learnt_from() -> None:
    class Masks(Twice):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            _, second = await super().run(infer_request, request_config)
            second.response_loss_mask = [[0, 1, 1, 1]]
            return [second]  # and the first answer not at all

    trajectory = whole(play(Masks, "4", "yes"))
    assert learnt(trajectory.segments[0], 0) == []
    assert learnt(trajectory.segments[1], 1) == [*RENDERER.encode("es"), 2]


class Counted(MultiTurnScheduler):
    """Calls the run that it overrides."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        output = await super().run(infer_request, request_config)
        assert isinstance(output, RolloutOutput)
        output.rollout_infos["lists"] = [len(ids) for ids in output.response_token_ids]
        return output

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        if current_turn == 1:
            infer_request.messages[-1]["content"] += "+"
        else:
            infer_request.messages.append({"role": "user", "content": "More."})
        return {"infer_request": infer_request}


@pytest.mark.usefixtures("games")
def test_the_run_that_is_overridden_may_be_called_and_takes_the_same_turns() -> None:
    trajectory = whole(play(Counted, "one", "two", "three", max_turns=3))
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "one"),
        (-1, "+"),
        (1, "two<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"),
        (2, "three<|im_end|>"),
    ]
    assert trajectory.turns[-1].info == {"lists": [8, 6], "num_turns": 3}


@pytest.mark.usefixtures("games")
def test_a_scheduler_without_turns_speaks_once() -> None:
    trajectory = whole(play(RolloutScheduler, "one"))
    assert (trajectory.assistant_texts, trajectory.stop) == (["one"], Stop.DONE)
    trajectory = whole(play("base_scheduler", "one"))
    assert trajectory.assistant_texts == ["one"]


def refused(run: Any, *said: str) -> str:
    kind = type("Odd", (MultiTurnScheduler,), {"run": run})
    error = play(kind, *(said or ("a", "b"))).error
    assert error is not None
    assert error.kind == "environment"
    return error.message


@pytest.mark.usefixtures("games")
def test_a_run_that_makes_no_sense_breaks_its_own_conversation() -> None:
    async def nothing(self: Any, request: Any, config: Any) -> None:
        return None

    async def no_output(self: Any, request: Any, config: Any) -> str:
        await self.infer_engine.infer_async(request, config)
        return "text"

    async def hotter(self: Any, request: Any, config: RequestConfig) -> None:
        config.temperature = 2.0
        await self.infer_engine.infer_async(request, config)

    async def two_at_once(self: Any, request: Any, config: Any) -> None:
        await asyncio.gather(*(self.infer_engine.infer_async(request, config) for _ in range(2)))

    async def blocks(self: Any, request: Any, config: Any) -> None:
        self.infer_engine.infer([request], config)

    async def breaks(self: Any, request: Any, config: Any) -> None:
        await self.infer_engine.infer_async(request, config)
        raise KeyError("gone")

    assert "Odd.run returned before it called its infer_engine" in refused(nothing)
    assert "Odd.run must return a RolloutOutput or a list of them; it returned 'text'" in refused(no_output)
    assert (
        "the scheduler's request has temperature=2.0. Training needs all tokens to be sampled from the recipe's distribution"
        in refused(hotter)
    )
    assert "run called its infer_engine a second time before the first response had arrived" in refused(two_at_once)
    assert "infer_engine.infer blocks until the model has answered" in refused(blocks)
    assert refused(breaks) == "KeyError: gone"


@pytest.mark.usefixtures("games")
def test_a_run_is_ended_when_its_conversation_is() -> None:
    ended: list[str] = []

    class Forever(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            try:
                while True:
                    await self.infer_engine.infer_async(infer_request, request_config)
                    infer_request.messages.append({"role": "user", "content": "More."})
            finally:
                ended.append("run")

        async def on_trajectory_end(self, infer_request: Any) -> None:
            ended.append("trajectory")

    trajectory = play(Forever, *["x"] * 9, table={"limits": Limits(turns=3)})
    assert (trajectory.stop, len(trajectory.turns), trajectory.error) == (Stop.MAX_TURNS, 3, None)
    assert ended == ["run", "trajectory"]


@pytest.mark.usefixtures("games")
def test_conversations_with_runs_of_their_own_do_not_hear_each_other() -> None:
    with made(Twice) as make:
        four = hold_all(scripted(*[[str(n), "yes"] for n in range(4)]), make, size=4)
    assert sorted(one.turns[1].info["first"] for one in four) == ["0", "1", "2", "3"]
    for one in four:
        assert whole(one).messages[0]["content"] == f"You said {one.assistant_texts[0]}. Sure?"


# games


class Guess(Env):
    """Higher or lower; sync and async methods mixed."""

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self.secret = int(self.env_config.get("secret", config.data_dict["secret"]))
        return "Guess.", {}, "You guess numbers."

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        guess = int(action[-1]["content"])
        right = guess == self.secret
        return ("Right." if right else "No."), (1.0 if right else -0.25), right, {"guess": guess}

    def close(self) -> None:  # type: ignore[override]
        pass


class LastTwo(ContextManager):
    """Shows the system message and the last two messages."""

    def manage_context(self, history: Any, trajectory_id: str) -> Any:
        return [history[0], *history[-2:]] if len(history) > 4 else history


@pytest.fixture
def games() -> Any:
    envs["guess"], context_managers["last_two"] = Guess, LastTwo
    yield
    del envs["guess"], context_managers["last_two"]


@pytest.mark.usefixtures("games")
def test_a_game_opens_the_conversation_and_pays_each_move() -> None:
    row = a_row("placeholder", secret=4)
    trajectory = whole(play("gym_scheduler", "3", "5", "4", row=row, gym_env="guess", max_turns=9))
    assert [message["content"] for message in trajectory.messages] == [
        "You guess numbers.", "Guess.", "3", "No.", "5", "No.", "4",
    ]  # fmt: skip
    assert [turn.reward for turn in trajectory.turns] == [-0.25, -0.25, 1.0]
    assert trajectory.turns[-1].info == {
        "total_reward": 0.5,
        "step_rewards": [-0.25, -0.25, 1.0],
        "gym_done": True,
        "env_info": {"guess": 4},
    }
    assert (trajectory.stop, len(trajectory.turns)) == (Stop.DONE, 3)


@pytest.mark.usefixtures("games")
def test_a_row_names_its_game_and_the_weight_of_its_reward_is_the_recipes() -> None:
    row = a_row("x", secret=1, env_config={"name": "guess", "secret": 7})
    trajectory = whole(play("gym_scheduler", "7", row=row, gym_weight=0.5))
    assert [turn.reward for turn in trajectory.turns] == [0.5]
    trajectory = whole(play("gym_scheduler", "7", row=row, use_gym_env=False))
    assert [turn.reward for turn in trajectory.turns] == [0.0]


@pytest.mark.usefixtures("games")
def test_a_context_manager_shortens_what_the_model_is_shown_and_nothing_is_trained_twice() -> None:
    row = a_row("x", secret=4)
    engine = Says("1", "2", "4")
    trajectory = whole(play("gym_scheduler", engine, row=row, gym_env="guess", context_manager="last_two"))
    assert RENDERER.decode(engine.requests[2].token_ids) == (
        "<|im_start|>system\nYou guess numbers.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [[turn for turn, _ in spoken(segment) if turn >= 0] for segment in trajectory.segments] == [[0, 1], [2]]


@pytest.mark.usefixtures("games")
def test_a_game_that_there_is_not_breaks_the_conversation_with_its_name() -> None:
    error = play("gym_scheduler", "1", row=a_row("x"), gym_env="gues").error
    assert error is not None
    assert "there is no environment 'gues'; did you mean 'guess'?; registered are: " in error.message
    error = play("gym_scheduler", "1", row=a_row("x")).error
    assert error is not None
    assert "neither the row nor environment.arguments.gym_env names the environment" in error.message


@pytest.mark.usefixtures("games")
def test_a_scheduler_that_pays_by_total_reward_is_paid_if_the_recipe_says_so() -> None:
    class Pays(MultiTurnScheduler):
        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {"rollout_infos": {"total_reward": float(current_turn)}}

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "user", "content": "More."})
            return {"infer_request": infer_request}

    assert [turn.reward for turn in play(Pays, "a", "b", max_turns=2).turns] == [0.0, 0.0]
    assert [turn.reward for turn in play(Pays, "a", "b", max_turns=2, use_gym_env=True).turns] == [1.0, 1.0]


@pytest.mark.usefixtures("games")
def test_images_that_rollout_infos_names_stand_where_the_messages_say(tmp_path: Any) -> None:
    pytest.importorskip("PIL")
    from support.vision import picture, save_vision_model
    from turnwise.chat.renderer import Renderer
    from turnwise.types import Row

    renderer = Renderer.from_pretrained(save_vision_model(tmp_path / "sees"))

    class Crops(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            cut = infer_request.images[0].crop((0, 0, 16, 16))
            infer_request.messages.append({"role": "user", "content": "<image>Nearer."})
            return {"infer_request": infer_request, "rollout_infos": {"images": [*infer_request.images, cut], "n": 1}}

    whole_picture = picture(32, 16, seed=1)
    row = Row(
        id="1",
        messages=[
            {"role": "user", "content": [{"type": "image", "image": whole_picture}, {"type": "text", "text": "?"}]}
        ],
    )
    engine = scripted(["Let me look.", "A dog."], renderer=renderer)
    trajectory = whole(play(Crops, engine, row=row, max_turns=2, table={"renderer": renderer}))
    (segment,) = trajectory.segments
    assert [(one.kind, one.length, one.source.size) for one in segment.media] == [
        ("image", segment.media[0].length, (32, 16)),
        ("image", segment.media[1].length, (16, 16)),
    ]
    assert segment.media[0].length == 2 * segment.media[1].length
    assert trajectory.turns[0].info == {"n": 1}

    # an image without a place stands at the start of the newest message that is not the model's
    class Forgets(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "user", "content": "Nearer."})
            return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images * 2}}

    engine = scripted(["Is <image> an image?", "A dog."], renderer=renderer)
    trajectory = whole(play(Forgets, engine, row=row, max_turns=2, table={"renderer": renderer}))
    assert [one.source.size for one in trajectory.segments[0].media] == [(32, 16), (32, 16)]
    assert [part["type"] for part in trajectory.messages[2]["content"]] == ["image", "text"]
    assert trajectory.messages[1]["content"] == "Is <image> an image?"  # the model's words are words

    # there must be an image for each place
    class Invents(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "user", "content": "<image>Nearer."})
            return {"infer_request": infer_request}

    error = play(
        Invents, scripted(["Let me look.", "A dog."], renderer=renderer), row=row, table={"renderer": renderer}
    ).error
    assert error is not None
    assert "the request has 1 images and its messages have tags for 2" in error.message


@pytest.mark.usefixtures("games")
def test_ms_swifts_math_env_asks_until_the_answer_is_right() -> None:
    row = a_row("Ignored.", problem="What is 6 * 7?", solution="The answer is \\boxed{42}.")
    trajectory = whole(
        play("gym_scheduler", "\\boxed{41}", "\\boxed{42}", row=row, gym_env="math_env", use_gym_env=True, max_turns=3)
    )
    system, question, *said = trajectory.messages
    assert system["role"] == "system"
    assert system["content"].startswith("A conversation between User and Assistant.\n        The user asks a question")
    assert question == {"role": "user", "content": "What is 6 * 7?"}
    assert [message["content"] for message in said if message["role"] == "user"] == [
        "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    ]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.stop is Stop.DONE


@pytest.mark.usefixtures("games")
def test_math_env_without_a_solution_fails_with_the_column() -> None:
    trajectory = play("gym_scheduler", "1", row=a_row("6*7?", answer="42"), gym_env="math_env", max_turns=3)
    assert trajectory.error is not None
    assert (
        "math_env needs the column solution, and the row has none; its columns are: answer" in trajectory.error.message
    )
    assert "data.columns.solution=<column>" in trajectory.error.message


# Schedulers written against what ms-swift's own have: helpers, attributes, base classes, older answers.


HELPERS = """
from modelscope.preprocessors.templates.utils import Messages
from swift.llm.infer.protocol import RolloutResponseChoice
from swift.rollout.multi_turn import MultiTurnScheduler
from swift.utils import remove_response


class Uses(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        from swift.rewards.orm import MathAccuracy
        assert self.engine is self.infer_engine is self.infer_engine.engine
        assert self.template is self.infer_engine.template is self.infer_engine.default_template
        assert self.infer_engine.template.template_meta.is_thinking
        assert isinstance(response_choice, RolloutResponseChoice)
        logprobs = self._extract_logprobs_from_choice(response_choice)
        answer = remove_response(infer_request.messages)
        assert remove_response(infer_request.messages) is None
        infer_request.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": str(logprobs)}]
        return {"infer_request": infer_request}
"""


@pytest.mark.usefixtures("third_party_games")
def test_the_helpers_and_attributes_of_ms_swift_are_there(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(HELPERS)
    trajectory = whole(play(f"{tmp_path}/uses.py:Uses", "a", "b", max_turns=2))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "[-0.125, -0.25]", "b"]


@pytest.mark.usefixtures("third_party_games")
def test_an_attribute_that_nobody_has_is_missed_by_its_name() -> None:
    class Misses(MultiTurnScheduler):
        def check_finished(self, *_: Any) -> bool:
            return bool(self.acc_funk)

    error = play(Misses, "a").error
    assert error is not None
    assert error.message == "AttributeError: 'InferEngine' object has no attribute 'acc_funk'"


VENDORED = """
from swift.infer_engine.protocol import RolloutOutput


class RolloutScheduler:
    def __init__(self, infer_engine=None, max_turns=None, *args, **kwargs):
        self.infer_engine, self.max_turns = infer_engine, max_turns

    async def on_trajectory_start(self, requests):
        requests[0].data_dict["started"] = requests[0].data_dict.get("started", 0) + 1

    async def async_infer(self, infer_requests, request_config):
        raise AssertionError("the loop holds the conversations")


class MultiTurnScheduler(RolloutScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        await self.on_trajectory_start([infer_request])
        ids, turn = [], 1
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            ids.append(response.choices[0].token_ids)
            infer_request.messages.append({"role": "assistant", "content": response.choices[0].message.content})
            if turn == self.max_turns:
                infos = {"started": infer_request.data_dict["started"], "total_reward": 3.0}
                return RolloutOutput(response, infer_request.messages, ids, rollout_infos=infos)
            infer_request = self.step(infer_request, response.choices[0], turn)["infer_request"]
            turn += 1


class Mine(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "More."})
        return {"infer_request": infer_request}


class Old:
    def __init__(self, max_turns=None):
        self.max_turns = max_turns

    def check_finished(self, infer_request, result, current_turn):
        return False

    def step(self, infer_request, result, current_turn):
        infer_request.messages.append({"role": "user", "content": "More."})
        return infer_request, {"n": current_turn}
"""


@pytest.fixture
def vendored(tmp_path: Path) -> str:
    (tmp_path / "vendored.py").write_text(VENDORED)
    return str(tmp_path / "vendored.py")


@pytest.mark.usefixtures("third_party_games")
def test_a_plugin_that_brings_the_base_classes_with_it_is_read_by_its_methods(vendored: str) -> None:
    trajectory = whole(play(f"{vendored}:Mine", "a", "b", max_turns=2, use_gym_env=True, gym_weight=0.5))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "More.", "b"]
    assert trajectory.turns[1].info == {"started": 1, "total_reward": 3.0}
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.5]


@pytest.mark.usefixtures("third_party_games")
def test_a_run_that_is_to_be_paid_returns_its_total_reward() -> None:
    class Unpaid(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            output = await super(MultiTurnScheduler, self).run(infer_request, request_config)
            output.rollout_infos["score"] = 1.0  # type: ignore[union-attr]
            return output

    error = play(Unpaid, "a", use_gym_env=True).error
    assert error is not None
    assert (
        "use_gym_env takes the reward from rollout_infos['total_reward'], and Unpaid.run returned none" in error.message
    )


@pytest.mark.usefixtures("third_party_games")
def test_a_step_may_answer_with_the_request_and_a_dictionary(vendored: str) -> None:
    trajectory = whole(play(f"{vendored}:Old", "a", "b", max_turns=2))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "More.", "b"]
    assert trajectory.turns[0].info == {"n": 1}


@pytest.mark.usefixtures("third_party_games")
@pytest.mark.parametrize("nothing", ["", None])
def test_an_empty_answer_behind_an_answer_says_that_the_model_goes_on_with_its_own(nothing: Any) -> None:
    class Dummy(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            if current_turn == 1:
                infer_request.messages[-1]["content"] += " and"
            else:
                infer_request.messages.append({"role": "user", "content": "More."})
            infer_request.messages.append({"role": "assistant", "content": nothing})
            return {"infer_request": infer_request}

    trajectory = whole(play(Dummy, "one", " two", "three", max_turns=3))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "one and two", "More.", "three"]
    assert spoken(trajectory.segments[0]) == [
        (-1, ASKED),
        (0, "one"),
        (-1, " and"),
        (1, " two<|im_end|>"),
        (-1, "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"),
        (2, "three<|im_end|>"),
    ]


@pytest.mark.usefixtures("third_party_games")
def test_an_answer_cut_and_masked_as_math_tips_does_it_keeps_what_was_sampled(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)

    class Tips(MultiTurnScheduler):
        def check_finished(self, infer_request: Any, *_: Any) -> bool:
            return "But wait" in infer_request.messages[-1]["content"]

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            kept = response_choice.message.content.partition("</think>")[0]
            ids = response_choice.token_ids
            count = next(n for n in range(1, len(ids)) if len(self.tokenizer.decode(ids[:n])) >= len(kept))
            tips = self.tokenizer.encode("But wait", add_special_tokens=False)
            infer_request.messages[-1]["content"] = kept + "But wait"
            return {
                "infer_request": infer_request,
                "response_token_ids": ids[:count] + tips,
                "response_loss_mask": [1] * count + [0] * len(tips),
                "rollout_logprobs": self._extract_logprobs_from_choice(response_choice)[:count],
            }

    trajectory = whole(play(Tips, "I think</think>5", ", 4", tokenizer=str(tmp_path)))
    (segment,) = trajectory.segments
    assert spoken(segment) == [(-1, ASKED), (0, "I think"), (-1, "But wait"), (1, ", 4<|im_end|>")]
    assert RENDERER.decode(learnt(segment, 0)) == "I think"


# games


class Counts(Env):
    """Counts its moves, and who closes it."""

    closed = 0

    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        return "Go.", {}, ""

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        return "No.", 0.25, False, {}

    async def close(self) -> None:
        Counts.closed += 1


@pytest.fixture
def third_party_games() -> Any:
    envs["counts"], Counts.closed = Counts, 0
    yield
    del envs["counts"]


@pytest.mark.usefixtures("third_party_games")
def test_a_gym_scheduler_keeps_its_games_where_subclasses_look_for_them() -> None:
    class Doubles(GYMScheduler):
        async def _create_env(self, env_config: Any) -> Any:  # async, as in versions before 4.3
            return super()._create_env(env_config)

        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            result = await super().on_turn_end(infer_request, response_choice, current_turn)
            key = infer_request.uuid
            assert isinstance(self._envs[key], Counts)
            self._total_rewards[key] *= 2
            self._pending_obs[key] = f"Total {self._total_rewards[key]}"
            result["rollout_infos"]["total_reward"] = self._total_rewards[key]
            if current_turn == 2:
                await self._close_and_remove(key)
                result["done"] = True
            return result

    trajectory = whole(play(Doubles, "a", "b", gym_env="counts"))
    assert [one["content"] for one in trajectory.messages] == ["Go.", "a", "Total 0.5", "b"]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 1.0]
    assert Counts.closed == 1


@pytest.mark.usefixtures("third_party_games")
def test_a_gym_scheduler_that_a_plugin_copied_closes_its_games_too() -> None:
    class Copied(MultiTurnScheduler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._envs: dict[Any, Any] = {}

        async def _close_and_remove(self, uuid: str) -> None:
            if (env := self._envs.pop(uuid, None)) is not None:
                await env.close()

        async def on_trajectory_start(self, requests: Any) -> None:
            self._envs[requests[0].uuid] = Counts({})

    assert play(Copied, "a", max_turns=1).stop == "done"
    assert Counts.closed == 1


class Server:
    """A game on a server: blocks, as an OpenEnv client does."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.start = config["start"]
        self.moves: list[Any] = []
        self.closed = False

    def reset(self) -> tuple[Any, Any]:
        return {"left": self.start}, None

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        self.moves.append(action)
        left = self.start - len(self.moves)
        return {"left": left}, 1.0, left == 0, None

    def close(self) -> None:
        self.closed = True


@pytest.mark.usefixtures("third_party_games")
def test_an_open_env_is_played_with_actions_that_are_json_or_messages() -> None:
    made: list[Server] = []

    class OnServer(OpenEnvScheduler):
        def _create_env(self, env_config: dict[str, Any]) -> Server:
            made.append(Server(env_config))
            return made[-1]

    row = a_row("x", env_config={"start": 3, "system_message": "Play."})
    trajectory = whole(play(OnServer, '{"take": 1}', "```json\n[2]\n```", "three", row=row))
    assert [one["content"] for one in trajectory.messages] == [
        "Play.", '{"left": 3}', '{"take": 1}', '{"left": 2}', "```json\n[2]\n```", '{"left": 1}', "three",
    ]  # fmt: skip
    assert made[0].moves == [{"take": 1}, {"message": "[2]"}, {"message": "three"}]
    assert [turn.reward for turn in trajectory.turns] == [1.0, 1.0, 1.0]
    assert made[0].closed


@pytest.mark.usefixtures("third_party_games")
def test_without_a_client_an_open_env_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "openenv", None)  # as where it is not installed
    error = play("openenv_scheduler", "a", row=a_row("x", env_config={})).error
    assert error is not None
    assert "pip install openenv-core" in error.message
    assert OpenEnvWrapper({}).base_url == "http://localhost:8000"


@pytest.mark.usefixtures("third_party_games")
def test_a_scheduler_without_step_or_run_is_refused() -> None:
    assert "a class with its methods step or run" in str(
        play(type("Nothing", (), {}), "a").error.message  # type: ignore[union-attr]
    )
