"""Schedulers written against what ms-swift's own have: helpers, attributes, base classes, older answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import RENDERER, a_row, spoken
from support.swift import ASKED, learnt, play, whole
from turnwise.compat.swift.schedulers import (
    Env,
    GYMScheduler,
    MultiTurnScheduler,
    OpenEnvScheduler,
    OpenEnvWrapper,
    envs,
)

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


def test_the_helpers_and_attributes_of_ms_swift_are_there(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(HELPERS)
    trajectory = whole(play(f"{tmp_path}/uses.py:Uses", "a", "b", max_turns=2))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "[-0.125, -0.25]", "b"]


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


def test_a_plugin_that_brings_the_base_classes_with_it_is_read_by_its_methods(vendored: str) -> None:
    trajectory = whole(play(f"{vendored}:Mine", "a", "b", max_turns=2, use_gym_env=True, gym_weight=0.5))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "More.", "b"]
    assert trajectory.turns[1].info == {"started": 1, "total_reward": 3.0}
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.5]


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


def test_a_step_may_answer_with_the_request_and_a_dictionary(vendored: str) -> None:
    trajectory = whole(play(f"{vendored}:Old", "a", "b", max_turns=2))
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "More.", "b"]
    assert trajectory.turns[0].info == {"n": 1}


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


@pytest.fixture(autouse=True)
def games() -> Any:
    envs["counts"], Counts.closed = Counts, 0
    yield
    del envs["counts"]


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


def test_without_a_client_an_open_env_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "openenv", None)  # as where it is not installed
    error = play("openenv_scheduler", "a", row=a_row("x", env_config={})).error
    assert error is not None
    assert "pip install openenv-core" in error.message
    assert OpenEnvWrapper({}).base_url == "http://localhost:8000"


def test_a_scheduler_without_step_or_run_is_refused() -> None:
    assert "a class with its methods step or run" in str(
        play(type("Nothing", (), {}), "a").error.message  # type: ignore[union-attr]
    )
