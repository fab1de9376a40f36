"""SkyRL-Gym through the loop: registered environments and a class, with the rewards of the library's own steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.own_environment import needs
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

pytestmark = needs("skyrl_gym")

LIMITS = Limits(turns=8, tokens_per_turn=400)
SPEC = {"reward_spec": {"ground_truth": "5"}, "reward_model": {"ground_truth": "5"}, "extra_info": {"max_turns": 3}}
SEARCHED = {"ground_truth": {"target": ["Paris"]}}
PLAYED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": (SPEC, ["2 + 3 = 5\n#### 5"]),
    "gsm8k_multi_turn": (SPEC, ["Hm.", "#### 4", "#### 5"]),
    "aime": (SPEC, ["So the Answer: 5"]),
    "search": (
        {"reward_spec": SEARCHED, "max_turns": 3},
        ["Hm.", "<answer>Paris</answer>"],
    ),  # a search retries for 90 s
    "searchcode": ({"reward_spec": SEARCHED, "max_turns": 2}, ["Hm.", "<answer>Paris</answer>"]),
}
CLASS = """
from skyrl_gym.envs.searchcode.env import SearchCodeEnv
from skyrl_gym.tools import PythonCodeExecutorToolGroup
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Count(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.left = extras["start"]
        self.step_size = env_config.step_size

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"{self.left} left."}], {}

    def step(self, action):
        self.turns += 1
        self.left -= self.step_size
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"{self.left} left."}], reward=0.5, done=self.left <= 0,
            metadata={"left": self.left}, postprocessed_action=action[:2],
        )

    def get_metrics(self):
        return {"steps": self.turns, "name": "count"}

class Runs(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()
        self.init_tool_groups([PythonCodeExecutorToolGroup()])

class Coder(SearchCodeEnv):
    pass

class Wrong(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):
        super().__init__()

    def step(self, action):
        return 1.0

class Other:
    def __init__(self, name):
        pass
"""


def recipe(use: str, **arguments: Any) -> Config:
    return checked(
        {"model": "m", "data": {"train": "x"}, "environment": {"use": use, "arguments": arguments}}, source="r"
    )


def played(config: Config, columns: dict[str, Any], texts: list[str]) -> Trajectory:
    row = Row(id="1", messages=[{"role": "user", "content": "2 and 3?"}], fields=columns)
    return hold(Says(*texts, *["?"] * 9), assembly.environment_factory(config), row=row, limits=LIMITS)


def own_steps(name: str, columns: dict[str, Any], texts: list[str]) -> tuple[list[float], list[str]]:
    """The rewards and observations of the library's own steps."""
    import skyrl_gym
    from omegaconf import OmegaConf

    config = OmegaConf.create(
        {"search_url": "http://127.0.0.1:1/retrieve", "topk": 1, "timeout": 1, "log_requests": False}
    )
    environment = skyrl_gym.make(name, env_config=config, extras=columns)
    environment.init([{"role": "user", "content": "2 and 3?"}])
    rewards, shown = [], []
    for text in texts:
        answered = environment.step(text)
        rewards.append(float(answered["reward"]))
        if answered["done"]:
            break
        shown += [message["content"] for message in answered["observations"]]
    return rewards, shown


@pytest.mark.parametrize("name", PLAYED)
def test_an_environment_has_the_rewards_and_messages_of_the_librarys_own_steps(name: str) -> None:
    columns, texts = PLAYED[name]
    config = {"search_url": "http://127.0.0.1:1/retrieve", "topk": 1, "timeout": 1} if name.startswith("search") else {}
    allowed = {"unsandboxed": True} if name == "searchcode" else {}
    trajectory = played(recipe(f"skyrl_gym:{name}", config=config, **allowed), columns, texts)
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    rewards, shown = own_steps(name, columns, texts)
    assert [turn.reward for turn in trajectory.turns] == rewards
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"][1:]
    # the text of a failed connection has the address of an object
    assert [text[:40] for text in told] == [text[:40] for text in shown]


def test_the_row_is_the_extras_and_a_changed_action_changes_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CLASS, encoding="utf-8")
    trajectory = played(recipe(f"skyrl_gym:{path}:Count", config={"step_size": 2}), {"start": 4}, ["abcd", "efgh"])
    assert trajectory.error is None, trajectory.error
    assert [turn.info for turn in trajectory.turns] == [{"left": 2}, {"left": 0}]
    assert [message["content"] for message in trajectory.messages] == ["2 and 3?", "4 left.", "ab", "2 left.", "efgh"]
    assert trajectory.reward is None
    assert trajectory.metrics["skyrl_gym/steps"] == 2


def test_max_turns_is_the_recipes_where_the_row_has_none() -> None:
    columns = {"reward_spec": {"ground_truth": "5"}, "extra_info": {}}
    trajectory = played(recipe("skyrl_gym:gsm8k_multi_turn", max_turns=2), columns, ["#### 1", "#### 2", "#### 5"])
    assert [turn.reward for turn in trajectory.turns] == [0.1, 0.1]


def test_code_of_the_model_runs_outside_of_a_sandbox_only_if_the_recipe_says_so(tmp_path: Path) -> None:
    path, ran = tmp_path / "mine.py", tmp_path / "ran"
    path.write_text(CLASS, encoding="utf-8")
    for use in ("skyrl_gym:searchcode", "skyrl_gym:lcb", f"skyrl_gym:{path}:Coder"):
        with pytest.raises(ConfigError, match=r"without a sandbox.*arguments.unsandboxed: true"):
            assembly.environment_factory(recipe(use))
    with pytest.raises(ConfigError, match="unsandboxed has no effect: skyrl_gym:gsm8k runs no code"):
        assembly.environment_factory(recipe("skyrl_gym:gsm8k", unsandboxed=True))
    trajectory = played(recipe(f"skyrl_gym:{path}:Runs"), {}, ["a"])
    assert trajectory.error is not None
    assert "its Python tool in a process of this machine" in trajectory.error.message
    code = f"<tool><python>open({str(ran)!r}, 'w')</python></tool>"
    columns = {"reward_spec": SEARCHED, "max_turns": 2}
    played(recipe("skyrl_gym:searchcode", unsandboxed=True), columns, [code, "<answer>Paris</answer>"])
    assert ran.exists()


def test_what_is_not_of_the_librarys_form_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CLASS, encoding="utf-8")
    trajectory = played(recipe(f"skyrl_gym:{path}:Wrong"), {}, ["a"])
    assert trajectory.error is not None
    assert "step returned 1.0; it must return a mapping with observations, reward and done" in trajectory.error.message
    trajectory = played(recipe("skyrl_gym:gsm8k"), {}, ["a"])
    assert trajectory.error is not None
    assert "reward_spec field is required" in trajectory.error.message
    for use, arguments, message in (
        ("skyrl_gym:gms8k", {}, "did you mean 'gsm8k'"),
        ("skyrl_gym:search", {"config": {"top_k": 1}}, "no option 'top_k'; did you mean 'topk'"),
        ("skyrl_gym:gsm8k", {"max_turns": 0}, "max_turns is 0; it must be an integer of at least 1"),
        (f"skyrl_gym:{path}:Other", {}, "cannot be made with env_config and extras"),
    ):
        with pytest.raises(ConfigError, match=message):
            assembly.environment_factory(recipe(use, **arguments))
