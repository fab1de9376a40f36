"""Schedulers with a `run` of their own, gym environments, images: flows that are not step by step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.conversations import RENDERER, Says, a_row, hold_all, scripted, spoken
from support.swift import ASKED, learnt, made, play, whole
from turnwise.compat.swift.protocol import RequestConfig, RolloutOutput
from turnwise.compat.swift.schedulers import (
    ContextManager,
    Env,
    MultiTurnScheduler,
    RolloutScheduler,
    context_managers,
    envs,
)
from turnwise.rollout.context import Limits
from turnwise.types import Stop


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


def test_a_run_of_its_own_asks_the_loop_and_each_history_is_a_segment() -> None:
    trajectory = whole(play(Twice, "4", "yes"))
    assert [spoken(segment) for segment in trajectory.segments] == [
        [(-1, ASKED), (0, "4<|im_end|>")],
        [(-1, "<|im_start|>user\nYou said 4. Sure?<|im_end|>\n<|im_start|>assistant\n"), (1, "yes<|im_end|>")],
    ]
    assert trajectory.turns[1].info == {"first": "4", "n": 2}
    assert (trajectory.stop, trajectory.messages[-1]["content"]) == (Stop.DONE, "yes")


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


@pytest.fixture(autouse=True)
def games() -> Any:
    envs["guess"], context_managers["last_two"] = Guess, LastTwo
    yield
    del envs["guess"], context_managers["last_two"]


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


def test_a_row_names_its_game_and_the_weight_of_its_reward_is_the_recipes() -> None:
    row = a_row("x", secret=1, env_config={"name": "guess", "secret": 7})
    trajectory = whole(play("gym_scheduler", "7", row=row, gym_weight=0.5))
    assert [turn.reward for turn in trajectory.turns] == [0.5]
    trajectory = whole(play("gym_scheduler", "7", row=row, use_gym_env=False))
    assert [turn.reward for turn in trajectory.turns] == [0.0]


def test_a_context_manager_shortens_what_the_model_is_shown_and_nothing_is_trained_twice() -> None:
    row = a_row("x", secret=4)
    engine = Says("1", "2", "4")
    trajectory = whole(play("gym_scheduler", engine, row=row, gym_env="guess", context_manager="last_two"))
    assert RENDERER.decode(engine.requests[2].token_ids) == (
        "<|im_start|>system\nYou guess numbers.<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [[turn for turn, _ in spoken(segment) if turn >= 0] for segment in trajectory.segments] == [[0, 1], [2]]


def test_a_game_that_there_is_not_breaks_the_conversation_with_its_name() -> None:
    error = play("gym_scheduler", "1", row=a_row("x"), gym_env="gues").error
    assert error is not None
    assert "there is no environment 'gues'; did you mean 'guess'?; registered are: " in error.message
    error = play("gym_scheduler", "1", row=a_row("x")).error
    assert error is not None
    assert "neither the row nor environment.arguments.gym_env names the environment" in error.message


def test_a_scheduler_that_pays_by_total_reward_is_paid_if_the_recipe_says_so() -> None:
    class Pays(MultiTurnScheduler):
        async def on_turn_end(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {"rollout_infos": {"total_reward": float(current_turn)}}

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "user", "content": "More."})
            return {"infer_request": infer_request}

    assert [turn.reward for turn in play(Pays, "a", "b", max_turns=2).turns] == [0.0, 0.0]
    assert [turn.reward for turn in play(Pays, "a", "b", max_turns=2, use_gym_env=True).turns] == [1.0, 1.0]


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


def test_math_env_without_a_solution_fails_with_the_column() -> None:
    trajectory = play("gym_scheduler", "1", row=a_row("6*7?", answer="42"), gym_env="math_env", max_turns=3)
    assert trajectory.error is not None
    assert (
        "math_env needs the column solution, and the row has none; its columns are: answer" in trajectory.error.message
    )
    assert "data.columns.solution=<column>" in trajectory.error.message
