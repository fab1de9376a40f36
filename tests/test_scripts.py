"""The project's own programs: measures, tables of models, engines' environments, the site and its notebook, learning tasks."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_env
import library_environments
import numpy as np
import pytest
from credit_toy import Action, Problem, expected_gradient
from docs_site import MOVED, notebook_page, outside_fences, problems, redirect, site_pages, stage
from learning_tasks import digging, household
from learning_tasks.report import Curve, Point, markdown
from learning_tasks.setups import TASKS

from support.recipes import save_recipe
from support.training import train_run
from turnwise import Reply, Row, Turn
from turnwise.compat.providers.provider import PROVIDERS
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect
from turnwise.rewards.credit.critic import turn_gae
from turnwise.rewards.credit.outcome import grpo
from turnwise.rewards.credit.turns import gigpo, igpo, kevin, mt_grpo, turn_return

# scripts/first_contact.py, which nobody wants to mend when a GPU is there.


@pytest.mark.slow
def test_the_script_of_first_contact_runs_on_a_cpu(tmp_path: Path) -> None:
    """It is for the first minutes with a GPU, when nobody wants to mend it; it uses names of modules that change."""
    script = Path(__file__).parent.parent / "scripts" / "first_contact.py"
    out = tmp_path / "out"
    words = ["--small", "--device", "cpu", "--only", "machine,probes,attention,sampler", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, cwd=tmp_path)
    sections = [json.loads(line) for line in (out / "first_contact.jsonl").read_text().splitlines()]
    assert [section["section"] for section in sections] == words[4].split(","), done.stderr[-2000:]
    assert [section.get("failed") for section in sections] == [None] * 4


# scripts/measure.py counts what it says, and reports what is over its bound.


MEASURE = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "measure.py"))


def figures(tree: Path, **files: str) -> dict[str, Any]:
    """The figures of a small tree with these files."""
    for name, text in files.items():
        (tree / f"{name}.py").write_text(text, encoding="utf-8")
    return {one.name: one for one in MEASURE["source_figures"](tree)}


def test_a_small_file_that_one_neighbour_alone_imports_is_listed(tmp_path: Path) -> None:
    root = tmp_path / "pkg"
    root.mkdir()
    text = {
        "a": "from pkg.b import x\nfrom pkg import c\n",
        "b": "from pkg.c import y\n",
        "c": "y = 1\n",
        "d": "x\n" * 200,
    }
    found = figures(root, **text, e="from pkg.d import x\n")
    assert (found["modules"].value, found["median length of a module"].value) == (5, 1)
    assert (found["small files with one neighbour"].value, found["small files with one neighbour"].details) == (
        1,
        ("    1 b.py",),
    )


def test_the_longest_function_is_named(tmp_path: Path) -> None:
    body = "    x = 1\n" * 70
    found = figures(tmp_path, small="def f():\n    return 1\n", large=f"class A:\n  @property\n  def g(self):\n{body}")
    assert found["longest function"].value == 71
    assert found["longest function"].details[0].split() == ["71", "large.py:3", "g"]


def test_private_attributes_and_cached_properties_are_hidden_state(tmp_path: Path) -> None:
    text = """
class A:
    _annotated: int = 0
    _shared: ClassVar[int] = 0
    public: int = 0

    def __init__(self):
        self._a, self.b = 1, 2
        self._a = 3
        self.__name__ = "c"
        other._d = 4

    @cached_property
    def question(self):
        self._e += self._read
"""
    found = figures(tmp_path, a=text)["hidden state of one class"]
    assert (found.value, found.details[0].split(": ")[1]) == (4, "_a _annotated _e question()")


def test_a_class_name_that_is_defined_in_two_files_is_counted_once(tmp_path: Path) -> None:
    found = figures(
        tmp_path, a="class A: pass\nclass B: pass\n", b="class A: pass\n", c="def f():\n    class A: pass\n"
    )
    assert found["class names defined more than once"].value == 1
    assert found["class names defined more than once"].details == ("A: a.py:1, b.py:1, c.py:2",)


def test_a_class_with_the_name_of_another_systems_class_is_listed_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "compat" / "verl").mkdir(parents=True)
    found = figures(
        tmp_path,
        **{
            "a": "class ToolResponse: pass\nclass B: pass\n",
            "compat/verl/base": "class ToolResponse: pass\nclass B: pass\n",
        },
    )
    assert found["class names defined more than once"].value == 1
    assert found["class names defined more than once"].details == (
        "B: a.py:2, compat/verl/base.py:2",
        "ToolResponse (as in another system, not counted): compat/verl/base.py:1",
    )


def test_unclear_words_are_counted_in_prose_and_not_in_names_or_code_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nobody is told of `the whole`.\n\n```\ntold\n```\nUntold.\n", encoding="utf-8")
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text('"""It hears."""\ntold = "told"  # anew\nx = f"{told} was heard"\n', encoding="utf-8")
    found = MEASURE["unclear_words"](source, (page,))
    assert {word: dict(places) for word, places in found.items()} == {
        "hears": {"a.py": 1},
        "anew": {"a.py": 1},
        "heard": {"a.py": 1},
        "nobody": {"page.md": 1},
        "told": {"page.md": 1},
    }


def test_what_is_over_its_bound_is_reported_with_the_value_the_bound_and_what_to_do(tmp_path: Path) -> None:
    found = figures(tmp_path, a="def f():\n" + "    x = 1\n" * 80)
    bounds = dict.fromkeys(found, 100)
    assert list(MEASURE["problems"](found.values(), bounds)) == []
    (text,) = MEASURE["problems"](found.values(), {**bounds, "longest function": 80})
    assert "longest function: 81, and at most 80 is allowed" in text
    assert "a.py:1 f" in text
    assert MEASURE["ADVICE"].keys() == MEASURE["BOUNDS"].keys()


@pytest.mark.slow
def test_a_training_step_passes_through_the_loop_and_neither_through_the_record_nor_the_terminal() -> None:
    ran = MEASURE["trace_step"]()
    assert {"train.py", "data/order.py", "rollout/rollout.py", "rollout/session.py", "types.py"} <= ran.keys()
    assert {"training/batch.py", "training/forward.py", "engines/local/engine.py"} <= ran.keys()
    assert not any(name.startswith(("terminal/", "record/", "config/", "commands/", "doctor/")) for name in ran)


# scripts/model_table.py: a dozen families work as docs/models.md says; `make models` tries all.


ROOT = Path(__file__).parent.parent

DOZEN = [
    *("llama", "qwen3", "gemma3_text", "gpt2"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3"),  # experts, sinks, latent attention
    *("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1", "llama4_text"),  # recurrent states, chunks
]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The script, which imports all that trains."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import model_table

    return model_table


@pytest.mark.slow
def test_the_page_has_all_families(table: ModuleType) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    works, refused = page.split("## Refused")
    cells = re.findall(r"^\| (`[\w-]+`.*?) \|", works, re.MULTILINE)
    tried = [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]
    tried += re.findall(r"(?:^\| |; )`([\w-]+)`:", refused, re.MULTILINE)
    assert sorted(tried) == sorted(table.families())
    assert len(tried) >= 60


def test_the_tiny_model_has_all_kinds_of_layers(table: ModuleType) -> None:
    assert table.each_kind(["a", "a", "b", "a", "a", "b"]) == ["a", "b", "a", "b"]
    assert table.each_kind(["a", "b", "b", "b", "b"]) == ["a", "b", "b", "b"]
    assert table.each_kind([48] * 40, 4) == [4] * 4
    config = table.tiny_config("qwen3_5_text")
    assert (config.layer_types, config.hidden_size) == (["linear_attention", "full_attention"] * 2, 64)


@pytest.mark.slow
def test_a_dozen_families_work(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "model_table.py", *DOZEN, "--results", file], check=True, timeout=600
    )
    results = json.loads(file.read_text())
    assert {family: results[family]["problems"] for family in DOZEN} == {family: {} for family in DOZEN}
    # the next turn computes its new tokens only
    assert {results[family]["values"]["engine"]["cached"] for family in DOZEN} == {1.0}


def test_a_refused_family_says_why_and_does_not_recommend_what_nobody_tried(table: ModuleType, tmp_path: Path) -> None:
    result = table.try_family("deepseek_v32", tmp_path)
    assert list(result.problems) == ["engine"]
    assert "it has layers of the type indexed_attention" in result.problems["engine"]
    assert "docs/models.md lists the families that were tried" in result.problems["engine"]


# benchmarks/against_trl.py: the game that TRL plays is that of the recipe.


def test_trl_plays_the_number_game_of_the_recipe() -> None:
    root = Path(__file__).resolve().parents[1]
    game = runpy.run_path(str(root / "benchmarks" / "against_trl" / "number_game.py"))["Game"]
    recipe = runpy.run_path(str(root / "recipes" / "smollm2" / "game.py"))["number_game"]
    choice = random.Random(0)
    ended = set()
    for _ in range(60):
        row = {"low": 20, "high": 34, "secret": choice.randrange(20, 35)}
        said = [
            choice.choice(["no", "27", " 30.", "4000", f"{row['secret']}", f"{choice.randrange(20, 35)}"])
            for _ in range(4)
        ]
        ours, theirs = asyncio.run(played(recipe(), row, said)), game(row)
        answers = [theirs.answer(text) for text in said[: len(ours)]]
        assert answers[:-1] == [reply.messages[0]["content"] for reply in ours[:-1]]
        assert (answers[-1], theirs.reward) == (None, ours[-1].reward)
        ended.add((len(ours), theirs.reward))
    assert len(ended) > 6


def test_a_cut_game_has_the_reward_0_and_is_trained_on_as_in_trl(model: Path, tmp_path: Path) -> None:
    """TRL's side (trl_game.py) leaves the reward of a cut game at 0, and its loss has all sampled tokens."""
    root = Path(__file__).resolve().parents[1]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "-", "low": 20, "high": 34, "secret": 27}) + "\n", encoding="utf-8")
    recipe = save_recipe(
        tmp_path,
        model,
        data={"train": str(rows)},
        environment=f"{root}/recipes/smollm2/game.py:number_game",
        limits={"turns": 4, "tokens_per_turn": 1},
        credit={"name": "grpo"},
        train={"steps": 1, "batch_size": 1, "group_size": 4},
    )
    games, _, _ = train_run(recipe, tmp_path / "run")
    cut = [game for game in games if game["stop"] == "length"]
    assert len(cut) >= 3
    for game in cut:
        assert (game["reward"], [turn["weight"] for turn in game["turns"]]) == (0.0, [1.0])


async def played(environment: Any, row: dict[str, Any], said: list[str]) -> list[Reply]:
    """The environment's replies to these turns, up to the one that ends the conversation."""
    await environment.begin(Row(id="0", messages=[{"role": "user", "content": ""}], fields=row))
    replies: list[Reply] = []
    for text in said:
        turn = Turn(index=len(replies), message={"role": "assistant", "content": text}, text=text)
        replies.append(await environment.step(turn))
        if replies[-1].done:
            break
    return replies


# benchmarks/learning.py: what its task `digging` says of the estimators, its figures, and a short run.


LEARNING_ROOT = Path(__file__).resolve().parents[1]

GROUP = 8

DOORS, DIGGING, GUESSING, *_ = TASKS


def digging_problem(first, second):
    """The task `digging` with a logit for each of its two decisions: dig if sigmoid says so."""

    def decision(logit, place):
        dig, scores = 1 / (1 + math.exp(-logit)), np.zeros((2, 2))
        scores[:, place] = -dig, 1 - dig
        return (1 - dig, dig), scores

    (p, p_scores), (q, q_scores) = decision(first, 0), decision(second, 1)
    return Problem(
        decisions={
            "first": (Action(digging.AT_ONCE), Action(digging.PAY[0], next="second")),
            "second": (Action(digging.LATER), Action(digging.PAY[1], next="third")),
            "third": (Action(digging.LATER),),
        },
        start="first",
        probabilities={"first": p, "second": q, "third": (1.0,)},
        scores={"first": p_scores, "second": q_scores, "third": np.zeros((1, 2))},
    )


def end_of(estimator):
    """The expected reward after gradient ascent with the estimator's expected gradient, from probabilities of 1/2."""
    logits = np.zeros(2)
    for _ in range(120):
        gradient = expected_gradient(digging_problem(*logits), estimator, size=GROUP)
        logits = np.clip(logits + 0.5 * gradient / (np.abs(gradient).max() + 1e-9), -6, 6)
    return digging_problem(*logits).value("first")


def test_the_numbers_of_digging_are_those_of_its_problem():
    assert digging_problem(0, 0).value("first") == pytest.approx(DIGGING.start)
    assert digging_problem(50, 50).value("first") == pytest.approx(DIGGING.optimum)
    assert digging_problem(-50, 0).value("first") == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [grpo, turn_return, gigpo, turn_gae])
def test_unbiased_estimators_learn_to_dig(estimator):
    assert end_of(estimator) == pytest.approx(1.0, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [mt_grpo, igpo])
def test_estimators_that_centre_rewards_first_learn_to_stop_at_once(estimator):
    assert end_of(estimator) == pytest.approx(0.4, abs=0.01)


def test_kevin_follows_the_discounted_return():
    """The first dig becomes less likely at the start, and more likely when the second dig is likely."""
    at_start = expected_gradient(digging_problem(0, 0), kevin, size=GROUP)
    later = expected_gradient(digging_problem(0, 3), kevin, size=GROUP)
    assert at_start[0] < 0 < at_start[1]
    assert later[0] > 0


def curve(task, setup, seed, rewards, tokens=100):
    points = [Point(step, step * tokens, reward) for step, reward in enumerate(rewards)]
    return Curve(task, setup, seed, points, seconds=1.0)


def test_the_table_has_the_range_of_the_seeds_and_the_median_step_at_the_level():
    # the mean of five steps reaches 0.8 at step 4, at step 6 and never
    curves = [
        curve("doors", "grpo", 0, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        curve("doors", "grpo", 1, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]),
        curve("doors", "grpo", 2, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0.3]),
    ]
    assert "| grpo | 3 | 0.77 | 0.30 to 1.00 | 6 steps |" in markdown(TASKS, curves, {})
    assert "| grpo | 2 | 0.65 | 0.30 to 1.00 | no |" in markdown(TASKS, curves[1:], {})


def test_curves_over_tokens_are_compared_at_equal_tokens():
    # the second has twice the tokens of a step: the final reward of the first is that at its middle
    curves = [
        curve("guessing", "single-turn grpo", 0, [0.2, 0.4, 0.6, 0.8, 1.0]),
        curve("guessing", "multi-turn grpo", 0, [0.2, 0.9], tokens=200),
    ]
    page = markdown(TASKS, curves, {("doors", "turn_gae"): "no critic"})
    assert "| single-turn grpo | 1 | 0.60 | 0.60 to 0.60 | 275 tokens |" in page
    assert "| multi-turn grpo | 1 | 0.90 | 0.90 to 0.90 | 160 tokens |" in page
    assert "- doors, turn_gae: no critic" in page


@pytest.mark.slow
def test_a_short_run_shows_the_wrong_sign_of_mt_grpo(tmp_path):
    setups = ("mt_grpo",)  # what the other estimators converge to is computed above, with the exact gradient
    command = [
        sys.executable,
        LEARNING_ROOT / "benchmarks" / "learning.py",
        "--quick",
        "--tasks",
        "digging",
        "--out",
        tmp_path,
    ]
    command += ["--only", *setups]
    subprocess.run(command, capture_output=True, text=True, check=True)
    results = {}
    for file in (tmp_path / "results").glob("*.json"):
        result = json.loads(file.read_text())
        results[result["setup"]] = [point["reward"] for point in result["points"]]
    assert set(results) == set(setups)
    for rewards in results.values():
        assert len(rewards) == DIGGING.setups[0].quick_steps
        assert all(0.4 - 1e-9 <= reward <= 1.0 + 1e-9 for reward in rewards)
    last = {setup: np.mean(rewards[-5:]) for setup, rewards in results.items()}
    assert last["mt_grpo"] < DIGGING.start - 0.05
    assert (tmp_path / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "learning.md").read_text().count("| mt_grpo |") == 1


# benchmarks/library_environments.py


@pytest.mark.parametrize("task", library_environments.TASKS, ids=lambda task: task.name)
def test_each_task_of_the_benchmark_of_libraries_is_a_recipe_of_its_provider(task, tmp_path):
    config = checked(library_environments.recipe(task, tmp_path, seed=3), source="recipe")
    refuse_without_effect(config)
    provider, _, name = config.environment.use.partition(":")
    assert PROVIDERS[provider].name == task.name
    if name.startswith("benchmarks/"):
        assert (LEARNING_ROOT / name.partition(".py")[0]).with_suffix(".py").is_file()
    draws = random.Random(0)
    conversations = [library_environments.conversation(task, draws) for _ in range(30)]
    answers = {message["content"] for one in conversations for message in one["messages"][1::2]}
    assert len(answers) > 1  # random, so that there is something to learn
    assert max(map(len, answers)) < config.limits.tokens_per_turn  # a byte is a token, and a turn has an end


def test_no_held_out_triple_is_in_a_room_of_alfworlds_start_model_but_each_of_its_names_is():
    draws = random.Random(0)
    held_out = household.TRIPLES[: household.HELD_OUT]
    rooms = [household.random_room(draws) for _ in range(500)]
    seen = {(one.target, one.at[one.target], one.goal) for one in rooms}
    assert not seen & set(held_out)
    assert {name for triple in held_out for name in triple} <= {name for triple in seen for name in triple}


def test_alfworlds_start_model_sees_listed_commands_and_the_expert_wins_with_four_or_five():
    draws = random.Random(0)
    for triple in household.TRIPLES[:50]:
        turns = household.played(household.room(triple, 0), draws)
        assert all(command in text.partition("Commands: ")[2].split(", ") for text, command in turns)
        game = household.Game(household.room(triple, 0))
        for _ in range(4):
            game.step(game.expert(draws))
        if game.at[game.target] != game.goal:
            game.step(game.expert(draws))
        assert game.at[game.target] == game.goal


# The environments of the real engines: when they count as complete, and the stub modules of SGLang's


def make_marker(root: Path, engine: str, text: str) -> None:
    """An environment directory with an interpreter and a marker file."""
    interpreter = root / engine / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    (root / engine / engine_env.MARKER).write_text(text)


def test_an_environment_is_complete_if_it_was_made_from_the_present_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    assert not engine_env.is_complete("vllm")
    make_marker(tmp_path, "vllm", json.dumps({"fingerprint": engine_env.ENGINES["vllm"].fingerprint}))
    assert engine_env.is_complete("vllm")
    assert engine_env.python("vllm") == tmp_path / "vllm" / "bin" / "python"
    # `make` leaves it as it is
    assert engine_env.make("vllm") == tmp_path / "vllm" / "bin" / "python"
    assert sorted(path.name for path in (tmp_path / "vllm").iterdir()) == ["bin", "turnwise.json"]


@pytest.mark.parametrize("marker", ['{"fingerprint": "of an earlier recipe"}', "{", "[]", "{}"])
def test_another_or_a_damaged_marker_is_not_complete(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "sglang", marker)
    assert not engine_env.is_complete("sglang")
    monkeypatch.setattr(sys, "argv", ["engine_env.py", "sglang", "--check"])
    assert engine_env.main() == 1
    assert "sglang is missing or not complete; run `python scripts/engine_env.py sglang`" in capsys.readouterr().out


def test_an_environment_without_interpreter_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "vllm", json.dumps({"fingerprint": engine_env.ENGINES["vllm"].fingerprint}))
    (tmp_path / "vllm" / "bin" / "python").unlink()
    assert not engine_env.is_complete("vllm")


def test_missing_packages_are_listed_by_their_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-made environment is completed: packages with another version, or none, are installed."""
    monkeypatch.setenv("TURNWISE_ENGINES", str(tmp_path))
    make_marker(tmp_path, "vllm", "{}")
    answer = json.dumps({"torch": "2.13.0+cpu", "Wrong_Version": "1.0", "torchvision": "0.28"})
    interpreter = tmp_path / "vllm" / "bin" / "python"
    interpreter.unlink()
    interpreter.write_text(f"#!/bin/sh\necho '{answer}'\n")
    interpreter.chmod(0o755)
    lock = tmp_path / "engines" / "vllm.txt"
    lock.parent.mkdir()
    lock.write_text("# comment\ntorch==2.13.0\nwrong-version==2.0\n\nnot.there==1\n")
    monkeypatch.setattr(engine_env, "RECIPES", lock.parent)
    recipe = engine_env.ENGINES["vllm"]
    assert engine_env._differences(recipe) == (["wrong-version==2.0", "not.there==1"], ["torchvision"])


@pytest.mark.parametrize("engine", list(engine_env.ENGINES))
def test_the_recipes_pin_every_package_once_and_nothing_unwanted(engine: str) -> None:
    recipe = engine_env.ENGINES[engine]
    pins = engine_env.pins(recipe.lock)
    names = [pin.split("==")[0].lower() for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(names) == len(set(names))
    assert not {*recipe.unwanted, "flashinfer_python", "sglang-kernel"} & set(names)
    assert engine_env.TORCH in pins


def test_stub_modules_answer_imports_and_not_questions() -> None:
    code = """
import importlib.util, stub_modules
import torchvision.transforms
from torchvision.transforms import InterpolationMode
from vllm._custom_ops import rotary_embedding
assert InterpolationMode.NEAREST_EXACT.__name__ == "torchvision.transforms.InterpolationMode.NEAREST_EXACT"
try:
    rotary_embedding()
except RuntimeError as error:
    print(error)
try:
    import vllm.logger
except ImportError:
    print("no vllm.logger")
assert importlib.util.find_spec("timm") is None
"""
    environment = {"PYTHONPATH": str(engine_env.RECIPES)}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "this environment has no such package: only a stub, made by turnwise's scripts/engine_env.py",
        "no vllm.logger",
    ]


# The site of the documentation, and its notebook


# The script that builds the documentation site: its links, and what it refuses.


def a_repository(folder: Path, **pages: str) -> Path:
    """A repository with these pages of docs/, a recipe and a picture."""
    for name in ("docs/images", "recipes"):
        (folder / name).mkdir(parents=True)
    (folder / "docs" / "images" / "p.svg").write_text("<svg/>")
    (folder / "recipes" / "quiz.yaml").write_text("train: {steps: 1}\n")
    (folder / "recipes" / "quiz.md").write_text("# Quiz\n\n[All](../docs/all.md)\n")
    for name, text in pages.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    return folder


def test_links_of_the_repository_become_links_of_the_site(tmp_path: Path) -> None:
    text = "# All\n\n[r](../recipes/quiz.md#a), [s](../recipes/quiz.yaml), ![p](images/p.svg), [w](https://x.org/a), [h](#all)\n"
    root = a_repository(tmp_path / "repository", all=text + "\n```\n[in code](../nowhere.md)\n```\n")
    stage(root, tmp_path / "site")
    page = (tmp_path / "site" / "all.md").read_text()
    assert "[r](recipes/quiz.md#a), [s](source/recipes/quiz.yaml.md), ![p](images/p.svg)" in page
    assert "[w](https://x.org/a), [h](#all)" in page
    assert "[in code](../nowhere.md)" in page
    assert "[All](../all.md)" in (tmp_path / "site" / "recipes" / "quiz.md").read_text()
    assert "train: {steps: 1}" in (tmp_path / "site" / "source" / "recipes" / "quiz.yaml.md").read_text()


def test_a_link_to_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    root = a_repository(tmp_path / "repository", all="[x](../recipes/other.yaml)")
    with pytest.raises(SystemExit, match=r"docs/all\.md: the link \.\./recipes/other\.yaml leads to no file"):
        stage(root, tmp_path / "site")


def test_code_blocks_are_left_as_they_are() -> None:
    assert outside_fences("a\n```\na\n```\na\n", lambda text: text.replace("a", "b")) == "b\n```\na\n```\nb\n"


def test_problems_of_a_built_site_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a>'
        '<a href="https://x.org">4</a><a href="#top">5</a><script src="https://cdn.org/x.js"></script>'
        '<link rel="stylesheet" href="//fonts.org/f.css"><img src="gone.png"><pre class="mermaid">x</pre>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    (tmp_path / "style.css").write_text("@import 'https://fonts.org/g.css'; a { background: url(data:image/png;x) }")
    assert [problem.partition(": the site")[0] for problem in problems(tmp_path)] == [
        "a.html loads https://cdn.org/x.js",
        "a.html loads //fonts.org/f.css",
        "a.html loads gone.png, which does not exist",
        "a.html loads https://unpkg.com/mermaid (a mermaid block)",
        "a.html: the link b.html#gone leads to no anchor of b.html",
        "a.html: the link c.html leads to no file",
        "style.css loads https://fonts.org/g.css",
    ]


def test_the_address_of_a_page_that_moved_leads_to_its_new_place(tmp_path: Path) -> None:
    (tmp_path / "tools.html").write_text('<h2 id="mcp">MCP</h2>')
    redirect(tmp_path, {"guides/mcp": "tools#mcp", "search": "tools", "old": "tools#gone"})
    assert 'content="0; url=../tools.html#mcp"' in (tmp_path / "guides" / "mcp.html").read_text()
    assert list(problems(tmp_path)) == ["old.html: the link tools.html#gone leads to no anchor of tools.html"]
    pages = set(site_pages(ROOT).values())
    assert {f"{old}.md" for old in MOVED} & pages == set()
    assert {f"{new.partition('#')[0]}.md" for new in MOVED.values()} <= pages


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    picture = base64.b64encode(b"png").decode()
    cells = [
        {"cell_type": "markdown", "source": ["# T\n", "text"]},
        {
            "cell_type": "code",
            "source": ["1 + 1"],
            "outputs": [{"data": {"text/plain": ["2"]}}, {"data": {"image/png": picture, "text/plain": ["<Figure>"]}}],
        },
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    page, images = notebook_page(tmp_path / "n.ipynb")
    assert page == "# T\ntext\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n![Output of the cell](n-0.png)\n"
    assert images == {"n-0.png": b"png"}


def test_the_pages_of_the_repository_can_be_staged(tmp_path: Path) -> None:
    stage(ROOT, tmp_path / "site")
    for place in site_pages(ROOT).values():
        assert (tmp_path / "site" / place).is_file(), place


@pytest.mark.slow
def test_the_site_is_built_and_a_missing_anchor_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs turnwise[docs], as `make docs` installs it")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnot_in_nav")[0]
    (tmp_path / "mkdocs.yml").write_text(config)
    root = a_repository(tmp_path / "repository", all="# All\n\n[x](index.md#gone)\n", index="# Home\n")
    stage(root, tmp_path / "build" / "site-source")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'index.md#gone', but the doc 'index.md' does not contain an anchor '#gone'" in done.stderr


# The notebook of the site runs and learns, and the Python interface works in a Jupyter kernel.


# docs/notebook.ipynb runs from top to bottom, and the model learns in it.


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of jupyter's packages
def test_the_notebook_runs_and_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from run_notebook import NOTEBOOK, run

    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # this tree, whatever else is installed
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    # a third of its steps, after which much is learnt already; that the demo learns all of it is shown in test_recipes.py
    cells = [cell for cell in run(tmp_path / "out.ipynb", steps=8).cells if cell.cell_type == "code"]
    (trained,) = [cell for cell in cells if "from turnwise.api import train" in cell.source]
    before, after = map(float, re.findall(r"\d\.\d+", trained.outputs[-1].data["text/plain"]))
    assert before == pytest.approx(0.49, abs=0.1)
    assert after > before + 0.1
    stored = NOTEBOOK.read_text(encoding="utf-8")
    assert stored.count('"output_type"') >= 7  # the page shows the outputs
    assert stored.count('"image/png"') == 1  # the curve
    assert '"ename"' not in stored


# The Python interface in a real Jupyter kernel, where an event loop is running while a cell runs.


CELLS = [
    """
import asyncio
assert asyncio.get_running_loop().is_running()
import turnwise
from turnwise import Opening, Reply, environment

@environment
async def echo(row):
    turn = yield Opening(messages=row.messages)
    yield Reply(reward=float(row["answer"] in turn.text), done=True)

def tries(completion: str) -> float:
    return -len(completion) / 100
""",
    """
result = turnwise.train(
    model=MODEL, rows=({"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)), environment=echo, reward=[tries],
    train={"steps": 2, "batch_size": 2, "group_size": 2}, limits={"tokens_per_turn": 4}, output=OUTPUT,
)
print([line["step"] for line in result.metrics], len(result.trajectories))
""",
    """
run = turnwise.evaluate(models=[result], model=MODEL, eval_rows=[{"prompt": "1+1?", "answer": "2"}], environment=echo,
                        limits={"tokens_per_turn": 4}, output=OUTPUT, progress=False)
print(run.result.rows, list(run.models))
""",
    "print(len(turnwise.record.to_pandas(result.directory)))",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_trains_and_evaluates(model: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    first = f"import sys; sys.path[:0] = {sys.path!r}\nMODEL, OUTPUT = {str(model)!r}, {str(tmp_path / 'run')!r}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (first, *CELLS)])
    client = nbclient.NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert texts[2].splitlines()[-1] == "[1, 2] 8"
    assert texts[3].splitlines()[-1] == "1 ['run']"
    assert texts[4].splitlines()[-1] == "8"
