"""Runs with TRL's environments, and its `rollout_func`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.conversations import CUE, Says, a_row, a_table, spoken
from turnwise.cli import main
from turnwise.compat.trl import TrlReward
from turnwise.compat.trl_rollout import TrlRollout
from turnwise.errors import ConfigError
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Stop, Trajectory

# TRL's environments and reward functions in whole runs: `turnwise train` and `turnwise rollout`.


# as in TRL's examples with several servers (carla.py): one address for each instance, and no more of them
SERVERS = '''
class Game:
    urls = iter(["http://one", "http://two"])

    def __init__(self):
        self.url = next(Game.urls)
        self.busy = False

    def reset(self, **row):
        assert not self.busy
        self.busy, self.row, self.reward = True, row["name"], 0.0
        if row.get("breaks") and not getattr(self, "broke", False):
            self.busy, self.broke = False, True
            raise ValueError("no game today")
        return None

    def move(self, to: str) -> str:
        """
        Move.

        Args:
            to: Where to.
        """
        return to


def by_game(environments, completion_ids, name, log_extra, **kwargs):
    assert [env.row for env in environments] == name
    assert len({env.url for env in environments}) == len(environments)
    log_extra("url", [env.url for env in environments])
    for env in environments:
        env.busy = False
    return [float(sum(ids) % 7) for ids in completion_ids]
'''


def turnwise(
    command: str, options: dict[str, Any], model: Path, path: Path, *, servers: str = SERVERS
) -> list[dict[str, Any]]:
    """Run a command on a recipe, in this process. Returns its trajectories."""
    (path / "game.py").write_text(servers)
    for name in [name for name in sys.modules if name.startswith("turnwise_user.game_")]:
        del sys.modules[name]  # another run has instances of its own
    recipe = {
        "model": {"path": str(model)},
        "data": {"train": str(path / "rows.jsonl")},
        "limits": {"turns": 3, "tokens_per_turn": 24},
        **options,
    }
    if command == "train":
        recipe |= {"output": str(path / "run")}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = ["--out", str(path / "run")] if command == "rollout" else []
    with contextlib.chdir(path):
        assert main([command, str(path / "recipe.yaml"), *out]) == 0
    return [json.loads(line) for line in (path / "run" / "trajectories.jsonl").read_text().splitlines()]


def save(path: Path, *rows: dict[str, Any]) -> None:
    (path / "rows.jsonl").write_text("".join(f"{json.dumps({'prompt': 'Play.', **row})}\n" for row in rows))


def use(function: str, **arguments: Any) -> dict[str, Any]:
    made = {"arguments": arguments} if arguments else {}
    return {"use": "turnwise.compat.trl:TrlReward", "arguments": {"function": function, **made}}


def games(path: Path, **options: Any) -> dict[str, Any]:
    return {
        "environment": {
            "use": "turnwise.compat.trl:TrlEnvironments",
            "arguments": {"environment": f"{path / 'game.py'}:Game"},
        },
        "reward": {"group": [use(f"{path / 'game.py'}:by_game")]},
        **options,
    }


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "max_concurrent": 2}, {"train": {"max_staleness": 1}}])
def test_two_instances_serve_any_number_of_conversations(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    save(tmp_path, *({"name": f"row {n}"} for n in range(4)))
    held_out = {"data": {"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")}}
    train = {"steps": 3, "batch_size": 3, "group_size": 2, **options.pop("train", {})}
    trajectories = turnwise("train", {**games(tmp_path), **held_out, **options, "train": train}, model, tmp_path)
    assert len(trajectories) == 3 * 3 * 2
    assert [one["error"] for one in trajectories] == [None] * len(trajectories)
    for start in range(0, len(trajectories), 2):
        pair = trajectories[start : start + 2]
        assert {one["turns"][-1]["info"]["url"] for one in pair} == {"http://one", "http://two"}
        assert all(set(one["rewards"]) == {"turns", "by_game"} for one in pair)


def test_an_instance_whose_conversation_broke_serves_the_next_one(model: Path, tmp_path: Path) -> None:
    save(tmp_path, {"name": "a", "breaks": True}, {"name": "b"}, {"name": "c"})
    options = games(tmp_path, rollout={"samples_per_row": 2}, max_concurrent=2)
    trajectories = turnwise("rollout", options, model, tmp_path)
    assert [one["error"] is None for one in trajectories] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("lockstep", "reason"), [(False, "as many instances as the group has conversations"), (True, "`max_concurrent`")]
)
def test_a_group_with_more_conversations_than_instances_is_reported(
    model: Path, tmp_path: Path, lockstep: bool, reason: str
) -> None:
    save(tmp_path, {"name": "a"}, {"name": "b"})
    options = games(tmp_path, rollout={"samples_per_row": 3}, deterministic=lockstep)
    trajectories = turnwise("rollout", options, model, tmp_path)
    broke = [one["error"]["message"] for one in trajectories if one["error"] is not None]
    assert broke
    assert all("no more than 2 instances of Game can be created" in one and reason in one for one in broke)
    assert any(one["error"] is None for one in trajectories)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_function_of_the_batch_needs_an_instance_for_each_conversation_of_the_step(
    model: Path, tmp_path: Path, deterministic: bool
) -> None:
    save(tmp_path, {"name": "a"}, {"name": "b"})
    reward = {"batch": [use(f"{tmp_path / 'game.py'}:by_game")]}
    options = games(tmp_path, rollout={"samples_per_row": 1}, reward=reward)
    trajectories = turnwise("rollout", options, model, tmp_path)
    assert [set(one["rewards"]) for one in trajectories] == [{"turns", "by_game"}] * 2
    options = {**options, "rollout": {"samples_per_row": 2}, "deterministic": deterministic}
    broke = [one["error"]["message"] for one in turnwise("rollout", options, model, tmp_path) if one["error"]]
    assert len(broke) == 2
    assert all("as many instances as the step has conversations" in one for one in broke)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_conversations_of_later_steps_wait_for_instances_until_the_step_is_scored(
    model: Path, tmp_path: Path, max_staleness: int
) -> None:
    save(tmp_path, *({"name": f"row {n}"} for n in range(4)))
    reward = {"batch": [use(f"{tmp_path / 'game.py'}:by_game")]}
    train = {"steps": 4, "batch_size": 1, "group_size": 2, "max_staleness": max_staleness}
    trajectories = turnwise("train", games(tmp_path, train=train, reward=reward), model, tmp_path)
    assert [one["error"] for one in trajectories] == [None] * 8
    for start in range(0, 8, 2):
        pair = trajectories[start : start + 2]
        assert {one["turns"][-1]["info"]["url"] for one in pair} == {"http://one", "http://two"}
    too_large = {**train, "steps": 1, "batch_size": 2}
    trajectories = turnwise("train", games(tmp_path, train=too_large, reward=reward, replace=True), model, tmp_path)
    broke = [one["error"]["message"] for one in trajectories if one["error"]]
    assert len(broke) == 2
    assert all("no more than 2 instances of Game" in one for one in broke)
    assert all("as many instances as the step (4) has conversations" in one for one in broke)


def test_slow_constructors_of_a_step_come_before_those_of_later_steps(model: Path, tmp_path: Path) -> None:
    save(tmp_path, *({"name": f"row {n}"} for n in range(6)))
    reward = {"batch": [use(f"{tmp_path / 'game.py'}:by_game")]}
    train = {"steps": 6, "batch_size": 1, "group_size": 2, "max_staleness": 2}
    # the third instance is the first one of a later step: others of later steps must not get the fourth and last one first
    servers = SERVERS.replace(
        'iter(["http://one", "http://two"])', 'iter(["http://one", "http://two", "http://three"])'
    )
    slow = "self.url = next(Game.urls) if pause(len(made)) else None"
    servers = servers.replace("self.url = next(Game.urls)", slow)
    servers = (
        "import time\n\nmade = []\n\n\ndef pause(before):\n    made.append(before)\n"
        "    time.sleep({1: 0.8, 2: 0.4, 3: 0.8}.get(before, 0.0))\n    return True\n\n" + servers
    )
    trajectories = turnwise("train", games(tmp_path, train=train, reward=reward), model, tmp_path, servers=servers)
    assert [one["error"] for one in trajectories] == [None] * 12


SHIPPED = {
    "accuracy_reward": use("trl.rewards:accuracy_reward"),
    "reasoning_accuracy_reward": use("trl.rewards:reasoning_accuracy_reward"),
    "think_format_reward": use("trl.rewards:think_format_reward"),
    "get_soft_overlong_punishment": use(
        "trl.rewards:get_soft_overlong_punishment", max_completion_len=24, soft_punish_cache=24
    ),
    "get_cosine_scaled_reward": use("trl.rewards:get_cosine_scaled_reward", max_len=100),
    "get_repetition_penalty_reward": use("trl.rewards:get_repetition_penalty_reward", ngram_size=2),
}


def test_every_reward_function_that_trl_ships_runs_in_a_recipe(model: Path, tmp_path: Path) -> None:
    import trl.rewards

    assert set(SHIPPED) == {name for name in dir(trl.rewards) if name.endswith(("_reward", "_punishment"))}
    save(tmp_path, {"solution": "$4$"}, {"solution": "\\frac{1}{2}"})
    options = {"reward": {"group": list(SHIPPED.values())}, "train": {"steps": 2, "batch_size": 2, "group_size": 2}}
    trajectories = turnwise("train", options, model, tmp_path)
    assert [one["error"] for one in trajectories] == [None] * 8
    for one in trajectories:
        earned = one["rewards"]
        assert (earned["accuracy_reward"], earned["think_format_reward"]) == (0.0, 0.0)
        length = sum(turn >= 0 for turn in one["segments"][-1]["turn"])
        assert earned["soft_overlong_punishment_reward"] == pytest.approx(-length / 24)
        assert -1.0 <= earned["cosine_scaled_reward"] <= -0.5


# TRL's `rollout_func`: it generates the completions itself, and what it returns is compared with what was sampled.


USER = '''
from trl.experimental.openenv import generate_rollout_completions


def echo(prompts, trainer):
    """In the form of TRL's example echo.py."""
    outputs = generate_rollout_completions(trainer, prompts)
    texts = [trainer.processing_class.decode(one["completion_ids"], skip_special_tokens=True) for one in outputs]
    return {
        "prompt_ids": [one["prompt_ids"] for one in outputs],
        "completion_ids": [one["completion_ids"] for one in outputs],
        "logprobs": [one["logprobs"] for one in outputs],
        "env_reward": [len(text) / 10 for text in texts],
    }


def episode(prompts, trainer, added="!", trains_on_added=False):
    """Two turns: the environment's text follows the first one."""
    tokenizer, (messages,) = trainer.processing_class, prompts
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (first,), (tokens,), (logprobs,), _ = trainer.vllm_generation.generate([ids], None, trainer.num_generations)
    new = tokenizer.encode(added, add_special_tokens=False)
    second = trainer.vllm_client.generate(prompts=[[*ids, *tokens, *new]], max_tokens=2, temperature=trainer.temperature)
    more = second["completion_ids"][0]
    return {
        "prompt_ids": [ids],
        "completion_ids": [[*tokens, *new, *more]],
        "logprobs": [[*logprobs, *[0.0] * len(new), *second["logprobs"][0]]],
        "env_mask": [[*[1] * len(tokens), *[int(trains_on_added)] * len(new), *[1] * len(more)]],
        "won": True,
    }


def reward_from_env(completions, env_reward, **kwargs):
    return [2 * value for value in env_reward]


def of_prompts(prompts):
    return {}


def two(prompts, trainer):
    output = echo(prompts, trainer)
    return {**output, "completion_ids": output["completion_ids"] * 2}


def asks_more(prompts, trainer):
    echo(prompts, trainer)
    return trainer.accelerate_everything
'''


@pytest.fixture
def user(tmp_path: Path) -> str:
    path = tmp_path / "rollouts_of_trl.py"
    path.write_text(USER)
    return str(path)


def held(setup: TrlRollout, *turns: str) -> Trajectory:
    async def run() -> Trajectory:
        context = setup.use_context(a_table(Says(*turns), lambda: setup.make(lambda tools, then: then)))
        group = new_group(a_row(), size=1, seed=0)
        await rollout_groups([group], context)
        return group.trajectories[0]

    return asyncio.run(run())


def test_a_function_of_one_turn_and_its_fields_for_the_reward_function(user: str) -> None:
    trajectory = held(TrlRollout(f"{user}:echo"), "hello")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0]) == [(-1, f"<|im_start|>user\nHi<|im_end|>\n{CUE}"), (0, "hello<|im_end|>")]
    assert trajectory.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello"}]
    assert trajectory.turns[0].info["agent"]["fields"] == {"env_reward": 0.5}
    assert TrlReward(f"{user}:reward_from_env")([trajectory]) == [1.0]


def test_an_episode_of_several_turns_token_for_token(user: str) -> None:
    trajectory = held(TrlRollout(f"{user}:episode"), "hello", "world")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0])[1:] == [(0, "hello<|im_end|>"), (-1, "!"), (1, "wo")]
    assert trajectory.metrics["agent/unreturned_tokens"] == 0.0
    assert trajectory.turns[1].info["agent"]["fields"] == {"won": True}


def test_tokens_that_the_model_did_not_sample(user: str) -> None:
    refused = held(TrlRollout(f"{user}:episode", arguments={"trains_on_added": True}), "hello", "world")
    assert refused.error is not None
    assert "with the mask 1, and the model did not sample it there" in refused.error.message
    ignored = TrlRollout(f"{user}:episode", arguments={"trains_on_added": True}, returned="ignore")
    trajectory = held(ignored, "hello", "world")
    assert trajectory.error is None
    assert spoken(trajectory.segments[0])[2] == (-1, "!")  # the record says what was sampled


def test_what_has_not_trl_s_form_is_refused(user: str) -> None:
    several = held(TrlRollout(f"{user}:two"), "hello")
    assert several.error is not None
    assert "returned 2 completion_ids for one prompt" in several.error.message
    unknown = held(TrlRollout(f"{user}:asks_more"), "hello")
    assert unknown.error is not None
    assert "trainer.accelerate_everything: turnwise has no trainer of TRL" in unknown.error.message
    for options, told in [
        ({"function": f"{user}:of_prompts"}, "cannot be called with (prompts, trainer"),
        ({"function": f"{user}:echo", "returned": "maybe"}, "returned is compare or ignore"),
    ]:
        with pytest.raises(ConfigError) as caught:
            TrlRollout(**_any(options))
        assert told in str(caught.value)


def _any(options: dict[str, Any]) -> Any:
    return options
