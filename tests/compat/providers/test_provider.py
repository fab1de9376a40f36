"""`environment: provider:name`: how a name becomes an environment with rows of its own, and a table of faults for all providers:
what is wrong in a library's environment is told, and costs its conversation only.

The environments of the table are classes of the libraries. A library that is not installed here has no rows:
`test_a_library_is_tested_in_an_environment_of_its_own` runs them with the Python of the environment that has it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.own_environment import interpreter, run_tests
from turnwise import assembly
from turnwise.cli import main
from turnwise.compat.providers.provider import PROVIDERS, Provider, environment_target
from turnwise.config.recipe import checked
from turnwise.data.order import DataState, Order, RowSource
from turnwise.errors import ConfigError, DataError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

LAKE = "gymnasium:FrozenLake-v1"
CLASS = """
from turnwise import SingleTurn
from turnwise.data.rows import ProvidedRows

class Brings(SingleTurn):
    def tools(self): return ()
    def make(self, in_front): return in_front((), SingleTurn())
    async def aclose(self): pass
    def rows(self, count, *, held_out):
        words = ["a", "b", "c"] if not held_out else ["z"]
        return ProvidedRows(records=[{"prompt": word, "word": word} for word in words])

class Wrong(Brings):
    def rows(self, count, *, held_out): return ProvidedRows(records=["no dict"])

class Empty(SingleTurn): pass
"""


def recipe(environment: Any, **data: Any) -> Config:
    return checked({"model": "m", "environment": environment, "data": data}, source="recipe")


def test_the_rows_of_an_environment_are_those_of_a_recipe_without_data() -> None:
    rows = assembly.rows(recipe(LAKE), limit=3)
    assert [(row.id, row["seed"], row.seed_step) for row in rows] == [("1", 0, 3), ("2", 1, 3), ("3", 2, 3)]
    held_out = assembly.rows(recipe(LAKE, eval="environment:2"), held_out=True)
    assert [(row["seed"], row.seed_step) for row in held_out] == [(10**9, 0), (10**9 + 1, 0)]
    assert len(assembly.rows(recipe(LAKE, train="environment:40"))) == 40


def test_a_later_pass_over_rows_of_seeds_has_other_seeds_and_none_is_repeated() -> None:
    rows = assembly.rows(recipe(LAKE, train="environment:4"))
    source = RowSource(rows, Order(4, seed=0), None, DataState())
    taken = [row for _, row in source.next_rows(12, [0] * 12)]
    assert sorted(row["seed"] for row in taken) == list(range(12))
    assert len({row.id for row in taken}) == 12


def test_the_rows_of_an_environment_and_of_a_file_can_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "", "seed": 77}\n', encoding="utf-8")
    rows = assembly.rows(recipe(LAKE, train=["environment:2", str(tmp_path / "more.jsonl")]))
    assert [(row["seed"], row.seed_step) for row in rows] == [(0, 2), (1, 2), (77, 0)]


def test_a_class_of_the_user_may_bring_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CLASS, encoding="utf-8")
    assert [row["word"] for row in assembly.rows(recipe(f"{path}:Brings"))] == ["a", "b", "c"]
    held_out = assembly.rows(recipe(f"{path}:Brings", eval="environment"), held_out=True)
    assert [row.messages[0]["content"] for row in held_out] == ["z"]
    with pytest.raises(DataError, match="row 1: the environment gives a str; a row must be a dict"):
        assembly.rows(recipe(f"{path}:Wrong"))
    with pytest.raises(ConfigError, match=r"data.train is missing: the environment .*:Empty brings no rows"):
        assembly.rows(recipe(f"{path}:Empty"))


def test_a_recipe_without_rows_is_refused_where_the_environment_has_none() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is missing: add it to the recipe"):
        checked({"model": "m"}, source="recipe")
    with pytest.raises(DataError, match="environment:none: write environment:N"):
        assembly.rows(recipe(LAKE, train="environment:none"))
    with pytest.raises(DataError, match="these rows have no answers to train on"):
        assembly.conversations(recipe(LAKE))


def test_a_gymnasium_environment_is_played_by_its_id() -> None:
    config = recipe({"use": LAKE, "arguments": {"arguments": {"is_slippery": False}}})
    (row,) = assembly.rows(config, limit=1)
    trajectory = hold(Says("2", "2", "1", "1", "1", "2"), assembly.environment_factory(config), row=row)
    assert trajectory.error is None
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("gymnasium:", r"'gymnasium:' has no name; write gymnasium:NAME"),
        ("gymnasium:FrozenLak-v1", "FrozenLak"),
        ("trl:nowhere.py:Class", "nowhere.py"),
        (
            "textarna:Nim-v0",
            r"no provider and no module 'textarna'; did you mean 'textarena'\?; the providers are: reasoning_gym",
        ),
        ("nemo_gym:x", "nemo_gym:x is no URL. Name a running resources server"),
    ],
)
def test_a_name_that_is_not_there_is_told(use: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(use))


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Provider(
        name="mars", source="x:Y", brings="a crater", module="no_such_library", package="mars", extra="red"
    )
    monkeypatch.setitem(PROVIDERS, "mars", missing)
    with pytest.raises(
        ConfigError, match=r"mars needs the package mars, which is not installed: pip install 'turnwise\[red\]'"
    ):
        environment_target("mars:crater")


@pytest.mark.slow
def test_envs_lists_libraries_names_and_what_an_environment_brings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(PROVIDERS)
    assert main(["envs", "gymnasium"]) == 0
    known = capsys.readouterr().out.splitlines()
    assert "FrozenLake-v1" in known
    assert "Ant-v2" not in known  # gymnasium says only that mujoco_py is missing
    assert main(["envs", LAKE, "arguments={is_slippery: false}"]) == 0
    shown = capsys.readouterr().out
    assert "players  one" in shown
    assert "answers  an integer from 0 to 3" in shown
    assert shown.endswith("[user] 0\n")
    pytest.importorskip("textarena")
    assert main(["envs", "textarena:Nim-v0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("needs    textarena:Nim-v0 is a game of 2 players")
    assert "shown with opponent=random" in shown
    assert "Current Pile" in shown
    assert main(["envs", "gymnasum:x"]) == 1
    assert "did you mean 'gymnasium'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "requirement", "module", "tests", "faults"),
    [
        # its classic environments need other versions of packages that the tests of turnwise use
        ("verifiers_classic", "verifiers==0.3.1", "verifiers.legacy", "test_verifiers.py", "verifiers"),
        ("verifiers", "verifiers==0.4.0", "verifiers.v1", "test_verifiers_v1.py", "verifiers_v1"),
        ("inspect", "inspect_ai==0.3.285", "inspect_ai", "test_inspect.py", "inspect"),
        ("openenv", "openenv-core==0.3.0", "openenv.core", "test_openenv.py", "openenv"),
        ("textworld", "textworld==1.7.0", "textworld", "test_textworld.py", "textworld"),
        ("alfworld", "alfworld==0.4.2", "alfworld.agents.environment.alfred_tw_env", "test_alfworld.py", "alfworld"),
    ],
)
def test_a_library_is_tested_in_an_environment_of_its_own(
    environment: str, requirement: str, module: str, tests: str, faults: str
) -> None:
    """Its tests, and its rows of the table of faults; the rows of other libraries are those of the quick tests."""
    here = Path(__file__).parent
    run_tests(
        interpreter(environment, requirement, module),
        [here / tests, Path(__file__)],
        f"not environment_of_its_own and ({tests} or {faults}-)",
    )


# What is wrong in a library's environment is told, and costs its conversation only: one table of faults for all providers.


of_libraries = pytest.mark.filterwarnings("ignore")
SLEEP = 25.0  # seconds
SOON = 20.0

GYMNASIUM = """
import gymnasium, time

class Faulty(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(9)

    def __init__(self, fault):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        if self.fault == "hangs":
            time.sleep(SLEEP)
        return 7 if self.fault == "reset" else (0, {})

    def step(self, action):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if self.fault == "step" else (0, None if self.fault == "reward" else 1.0, True, False, {})
"""
AVIARY = """
import asyncio, time
from aviary.core import Environment, Message

class Faulty(Environment):
    def __init__(self, fault):
        self.fault = fault

    async def reset(self):
        if self.fault == "hangs":
            await asyncio.sleep(SLEEP)
        if self.fault == "blocks":
            time.sleep(SLEEP)
        return 7 if self.fault == "reset" else ([Message(content="Go")], [])

    async def step(self, action):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if self.fault == "step" else ([], None if self.fault == "reward" else 1.0, True, False)
"""
SKYRL = """
import time
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Faulty(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.fault = env_config["fault"]

    def init(self, prompt):
        if self.fault == "hangs":
            time.sleep(SLEEP)
        return 7 if self.fault == "reset" else (prompt, {})

    def step(self, action):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        if self.fault == "step":
            return 7
        reward = None if self.fault == "reward" else 1.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
"""
TEXTARENA = """
import time
import textarena

class Faulty(textarena.Env):
    def __init__(self, fault):
        self.fault = fault

    def reset(self, num_players, seed=None):
        if num_players != 1:
            raise ValueError("for one")
        if self.fault == "hangs" and seed != 0:  # the seed of the trial at the start
            time.sleep(SLEEP)
        self.state = None

    def get_observation(self):
        return 7 if self.fault == "reset" else (0, "Go")

    def step(self, action):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if self.fault == "step" else (True, {})

    def close(self):
        return {0: None if self.fault == "reward" else 1.0}, {0: {}}

textarena.envs.registration.register("Faulty-v0", entry_point=Faulty)
"""
REASONING_GYM = """
import time
from dataclasses import dataclass
import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset

@dataclass
class Config:
    fault: str = ""
    seed: int = 0
    size: int = 10

    def validate(self):
        pass

class Faulty(ProceduralDataset):
    def __init__(self, config):
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx):
        if self.config.fault == "hangs":
            time.sleep(SLEEP)
        return 7 if self.config.fault == "reset" else {"question": "Go", "answer": "1", "metadata": {}}

    def score_answer(self, answer, entry):
        if self.config.fault == "raises":
            raise RuntimeError("the board is broken")
        return {"step": "much", "reward": None}.get(self.config.fault, 1.0)

register_dataset("faulty", Faulty, Config)
"""
OPENENV = """
import time
from openenv.core.env_server import Action, Environment, Observation, State

class Say(Action):
    text: str

class Seen(Observation):
    text: str = ""

class Faulty(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def reset(self, seed=None, episode_id=None, **kwargs):
        if self.fault == "hangs":
            time.sleep(SLEEP)
        return 7 if self.fault == "reset" else Seen(text="Go")

    def step(self, action: Say, timeout_s=None, **kwargs):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if self.fault == "step" else Seen(done=True, reward=1.0)

    @property
    def state(self):
        return State()
"""
VERIFIERS = """
import asyncio
import verifiers as vf
from datasets import Dataset

class Faults(vf.MultiTurnEnv):
    def __init__(self, fault, **more):
        self.fault = fault
        super().__init__(**more)

    async def setup_state(self, state, **more):
        if self.fault == "hangs":
            await asyncio.sleep(SLEEP)
        return 7 if self.fault == "reset" else state

    async def env_response(self, messages, state, **more):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if self.fault == "step" else [{"role": "user", "content": "Go on"}]

def faulty(fault):
    def good(completion):
        return None if fault == "reward" else 1.0
    data = Dataset.from_list([{"task": 0, "question": "Go", "answer": "1"}])
    return Faults(fault, dataset=data, rubric=vf.Rubric(funcs=[good]), max_turns=2)
"""
INSPECT = """
import asyncio
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, solver

@solver
def faults(fault):
    async def solve(state, generate):
        if fault == "hangs":
            await asyncio.sleep(SLEEP)
        if fault == "reset":
            return 7
        state = await generate(state)
        if fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if fault == "step" else state
    return solve

@scorer(metrics=[mean()])
def good(fault):
    async def score(state, target):
        return Score(value={"a": None if fault == "reward" else 1.0})
    return score

@task
def faulty(fault):
    return Task(dataset=[Sample(input="Go", target="1")], solver=faults(fault), scorer=good(fault))
"""
TEXTWORLD = """
import time
import textworld
from textworld.challenges import CHALLENGES

ABOUT, MAKE, PARSER = CHALLENGES["tw-coin_collector"]
START = textworld.start
FAULTS = {}

class Faulty(textworld.core.Wrapper):
    def __init__(self, game, fault):
        super().__init__(game)
        self.fault = fault

    def reset(self):
        if self.fault == "hangs":
            time.sleep(SLEEP)
        return 7 if self.fault == "reset" else super().reset()

    def step(self, command):
        if self.fault == "raises":
            raise RuntimeError("the board is broken")
        state, score, done = super().step(command)
        return 7 if self.fault == "step" else (state, None if self.fault == "reward" else score, done)

def parser():
    made = PARSER()
    made.add_argument("--fault")
    return made

def make(settings, options=None):
    FAULTS[options.path] = settings["fault"]
    return MAKE(settings, options)

def start(file, **more):
    game = START(file, **more)
    return Faulty(game, FAULTS[file]) if file in FAULTS else game

CHALLENGES["tw-faulty"] = (ABOUT, make, parser)
textworld.start = start
"""
VERIFIERS_V1 = """
import asyncio
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class Data(vf.TaskData):
    fault: str

class Task(vf.Task[Data]):
    @vf.reward
    async def good(self, trace):
        return None if self.data.fault == "reward" else 1.0

class Config(vf.TasksetConfig):
    fault: str = ""

class Faulty(vf.Taskset[Task, Config]):
    def load(self):
        return [Task(Data(prompt="Go", fault=self.config.fault))]

class Harness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime):
        pass

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        if data.fault == "hangs":
            await asyncio.sleep(SLEEP)
        if data.fault == "reset":
            return 7
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": "Go"}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        if data.fault == "raises":
            raise RuntimeError("the board is broken")
        return 7 if data.fault == "step" else ProgramResult(0, "", "")

__all__ = ["Faulty", "Harness"]
"""
# provider: the library's module, the file, the name, the argument that has the fault, and what the model's turn is
LIBRARIES: dict[str, tuple[str, str, str, str]] = {
    "gymnasium": ("gymnasium", GYMNASIUM, "{file}:Faulty", "arguments"),
    "aviary": ("aviary.core", AVIARY, "{file}:Faulty", "arguments"),
    "skyrl_gym": ("skyrl_gym", SKYRL, "{file}:Faulty", "config"),
    "textarena": ("textarena", TEXTARENA, "Faulty-v0", "arguments"),
    "reasoning_gym": ("reasoning_gym", REASONING_GYM, "faulty", "config"),
    "openenv": ("openenv.core", OPENENV, "{file}:Faulty", "arguments"),
    "verifiers": ("verifiers.legacy", VERIFIERS, "{file}:faulty", "arguments"),
    "inspect": ("inspect_ai", INSPECT, "{file}@faulty", "arguments"),
    "textworld": ("textworld", TEXTWORLD, "tw-faulty", "arguments"),
    "verifiers_v1": ("verifiers.v1.semantic", VERIFIERS_V1, "{file}", "arguments"),
}
MORE: dict[str, dict[str, Any]] = {"textworld": {"level": 1}}
"""What else the argument must have."""
FAULTS: dict[str, dict[str, str]] = {
    "raises": dict.fromkeys(LIBRARIES, "the board is broken"),
    "hangs": dict.fromkeys(LIBRARIES, "the first prompt took longer than limits.seconds_per_turn=1.5|took longer than"),
    "reset": {
        "gymnasium": r"Faulty.reset returned .*; it must return \(observation, info\)",
        "aviary": r"Faulty.reset returned 7; it must return \(messages, tools\)",
        "skyrl_gym": r"Faulty.init returned 7; it must return \(messages, metadata\)",
        "textarena": r"Faulty-v0.get_observation returned 7; it must be \(player, text\)",
        "reasoning_gym": "faulty gave the entry 7; it must be a dictionary with a text",
        "openenv": "Faulty returned a int; it must be an OpenEnv Observation",
        "verifiers": "'int' object",
        "inspect": "faulty failed",
        "verifiers_v1": "'int' object has no attribute 'exit_code'",
        "textworld": "tw-faulty.reset returned 7; it must be a GameState with a feedback",
    },
    "step": {
        "gymnasium": r"Faulty.step returned .*; it must return \(observation, reward",
        "aviary": r"Faulty.step returned 7; it must return \(messages, reward",
        "skyrl_gym": "Faulty.step returned 7; it must return a mapping with observations, reward and done",
        "textarena": r"Faulty-v0.step returned 7; it must be \(done, info\)",
        "reasoning_gym": "reward 'much'; it must be a finite number",
        "openenv": "Faulty returned a int; it must be an OpenEnv Observation",
        "verifiers": "'int' object",
        "inspect": "faulty failed",
        "verifiers_v1": "'int' object has no attribute 'exit_code'",
        "textworld": r"tw-faulty.step returned 7; it must return \(state, score, done\)",
    },
    "reward": {
        **dict.fromkeys(LIBRARIES, "gave the reward None; it must be a finite number"),
        "verifiers": "the reward function good: .* gave the reward None; it must be a finite number",
        "inspect": "the scorer good gave .*None.*, which is no number",
        "verifiers_v1": "TaskError: task Task scoring: TypeError: .*not 'NoneType'",
    },
}
NO_FAULT = {("openenv", "reward")}  # None is allowed: a step without a reward


def there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


CASES = [
    pytest.param(provider, fault, id=f"{provider}-{fault}")
    for provider, (module, *_) in LIBRARIES.items()
    for fault in FAULTS
    if there(module) and (provider, fault) not in NO_FAULT
]


def faulty_recipe(use: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": use, "arguments": arguments}}, source="recipe")


def played(provider: str, fault: str, folder: Path, **arguments: Any) -> Trajectory:
    _, text, name, argument = LIBRARIES[provider]
    file = folder / f"faulty_{provider}.py"
    file.write_text(text.replace("SLEEP", str(SLEEP)), encoding="utf-8")
    if "{file}" not in name and file.stem not in sys.modules:  # registers a name
        made = importlib.util.spec_from_file_location(file.stem, file)
        assert made is not None
        assert made.loader is not None
        sys.modules[file.stem] = module = importlib.util.module_from_spec(made)
        made.loader.exec_module(module)
    config = faulty_recipe(
        f"{provider}:{name.format(file=file)}", **{argument: {**MORE.get(provider, {}), "fault": fault}}, **arguments
    )
    row = assembly.rows(checked({"model": "m", "data": {"train": str(rows_of(folder, provider))}}, source="r"))[0]
    limits = Limits(turns=3, tokens_per_turn=99, seconds_per_turn=1.5 if fault in ("hangs", "blocks") else 60.0)
    return hold(Says("1", "1", "1"), assembly.environment_factory(config), row=row, limits=limits)


def rows_of(folder: Path, provider: str) -> Path:
    path = folder / "rows.jsonl"
    row: dict[str, Any] = {"prompt": "Go", "seed": 3, "sample": 0, "question": "Go", "answer": "1"}
    if provider == "verifiers_v1":  # in classic environments, a task is a mapping
        row["task"] = 0
    path.write_text(f"{json.dumps(row)}\n", encoding="utf-8")
    return path


@of_libraries
@pytest.mark.parametrize(("provider", "fault"), CASES)
def test_a_fault_fails_its_conversation_with_a_message(provider: str, fault: str, tmp_path: Path) -> None:
    started = time.monotonic()
    trajectory = played(provider, fault, tmp_path)
    assert trajectory.error is not None, [turn.rewards for turn in trajectory.turns]
    assert re.search(FAULTS[fault][provider], trajectory.error.message), trajectory.error.message
    if fault == "hangs":
        assert trajectory.error.kind == "deadline"
        assert time.monotonic() - started < SOON


@of_libraries
def test_a_game_that_hangs_does_not_hold_up_other_games(tmp_path: Path) -> None:
    if not there("textarena"):
        return
    assert played("textarena", "hangs", tmp_path).error is not None
    started = time.monotonic()
    assert played("textarena", "none", tmp_path).turns[0].reward == 1.0
    assert time.monotonic() - started < SLEEP - 5


@of_libraries
def test_an_async_method_that_blocks_in_a_thread_costs_its_conversation_only(tmp_path: Path) -> None:
    if not there("aviary.core"):
        return
    trajectory = played("aviary", "blocks", tmp_path, thread=True)
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"


UNKNOWN = [
    ("reasoning_gym", "countdwn", r"did you mean 'countdown'\?; `turnwise envs reasoning_gym` lists"),
    ("textarena", "TicTacTo-v0", r"did you mean 'TicTacToe-v0'\?; `turnwise envs textarena` lists"),
    ("gymnasium", "FrozenLak-v1", "FrozenLak"),
    ("aviary", "dumy", r"did you mean 'dummy'\?; `turnwise envs aviary` lists"),
    ("skyrl_gym", "gsm8", r"did you mean 'gsm8k'\?; `turnwise envs skyrl_gym` lists"),
    ("textworld", "tw-coin_colector", r"did you mean 'tw-coin_collector'\?; `turnwise envs textworld` lists"),
    ("alfworld", "valid_sen", "did you mean 'valid_seen'"),
    ("nemo_gym", "blackjack", "is no URL. Name a running resources server"),
    ("verifiers_v1", "nowhere.py", "nowhere.py"),
    ("harbor", "nowhere", "nowhere is not a folder"),
    ("openenv", "nowhere.py:Game", "nowhere.py"),
    ("trl", "nowhere.py:Game", "nowhere.py"),
]


@of_libraries
@pytest.mark.parametrize(("provider", "name", "message"), UNKNOWN)
def test_a_name_that_is_not_there_is_told_with_the_most_similar_one(provider: str, name: str, message: str) -> None:
    if PROVIDERS[provider].installed is None:
        message = (
            rf"needs the package .*, which is not installed: pip install 'turnwise\[{PROVIDERS[provider].extra}\]'"
        )
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(faulty_recipe(f"{provider}:{name}"))


@of_libraries
@pytest.mark.parametrize("provider", [name for name, one in PROVIDERS.items() if one.module is not None])
def test_a_package_that_is_missing_is_told_with_an_extra_that_exists(
    provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, find = PROVIDERS[provider], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == one.module else find(name))
    with pytest.raises(ConfigError) as told:
        assembly.environment_factory(faulty_recipe(f"{provider}:x"))
    assert f"needs the package {one.package}, which is not installed: pip install 'turnwise[{one.extra}]'" in str(
        told.value
    )
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    required = project["project"]["optional-dependencies"][one.extra]
    assert any(re.split(r"[<>=~!\[; ]", line)[0] == one.package for line in required), required


@of_libraries
def test_a_game_for_two_is_not_played_alone() -> None:
    if not there("textarena"):
        return
    with pytest.raises(ConfigError, match="TicTacToe-v0 does not begin with 1 players: "):
        assembly.environment_factory(faulty_recipe("textarena:TicTacToe-v0", players=1))
    with pytest.raises(
        ConfigError, match=r"is a game of 2 players, and the model is one of them: set environment\.arg"
    ):
        assembly.environment_factory(faulty_recipe("textarena:TicTacToe-v0"))
