"""Pages say what is true: their examples run, with the values that they print."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from generated_pages import comparable, doctor_reports

import turnwise
from support.conversations import Says, a_row, call, hold, hold_all
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.compat.gym import GymEnvironments, ToolEnvironments
from turnwise.config.recipe import RENAMED, load
from turnwise.config.resume_rules import RULES
from turnwise.data.conversations import read_conversations
from turnwise.doctor.examine import examine
from turnwise.environments.agents import Program
from turnwise.environments.mcp import McpServers
from turnwise.environments.users import ModelledUser
from turnwise.options.schema import Config, ToolUse
from turnwise.record import read
from turnwise.sft.replay import replay, weigh
from turnwise.types import Group, MismatchKind
from turnwise.user_code.references import MOVED

# The pages about rewards and about engines say what is true: their examples run.


ROOT = Path(__file__).parents[2]

REWARDS, TRAINED, LIMITS, README = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("docs/rewards.md", "docs/engines.md", "docs/limits.md", "README.md")
)


def blocks(page: str, language: str) -> list[str]:
    """A page's examples."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_reward_functions_of_the_page_give_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (_, python, *_), (_, recipe, *_) = blocks(REWARDS, "python"), blocks(REWARDS, "yaml")
    (tmp_path / "my_rewards.py").write_text(python)
    options = {"model": {"path": "m"}, "data": {"train": "x"}, **yaml.safe_load(recipe)}
    scorer = assembly.scorer(Config.model_validate(options))
    row = a_row(answer="4")
    said = ["#### 4", "It is 2 + 2, so #### 4.0", "#### 5", "sorry #### 4"]
    group = Group(id="g", row=row, trajectories=[hold_all(Says(text), row=row)[0] for text in said])
    asyncio.run(scorer.score([group]))
    parts = [one.rewards for one in group.trajectories]
    assert [one["right"] for one in parts] == [1.0, 1.0, 0.0, 1.0]
    assert [one["polite"] for one in parts] == [0.2, 0.2, 0.2, 0.0]
    assert [one["no_failed_calls"] for one in parts] == [0.0] * 4
    assert [one.get("shortest") for one in parts] == [0.1, 0.0, None, 0.0]
    assert [one["normalised_length"] for one in parts] == pytest.approx([0.025, -0.05, 0.025, 0.0])
    in_all = [(one.reward or 0.0) - one.rewards["normalised_length"] for one in group.trajectories]
    assert in_all == pytest.approx([1.3, 1.2, 0.2, 1.0])


def test_what_the_page_names_of_a_trajectory_is_there() -> None:
    (one,) = hold_all(Says("a"))
    names = re.findall(r"^\| `trajectory\.(\w+)", REWARDS, re.MULTILINE)
    assert len(names) == 5
    for name in names:
        getattr(one, name)
    for name in ("text", "reasoning", "calls", "outcomes", "reward", "info", "finish_reason"):
        getattr(one.turns[0], name)


def test_the_examples_with_a_trained_model_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    shutil.copytree(ROOT / "demo" / "model", tmp_path / "runs" / "demo" / "checkpoint")
    for block in blocks(TRAINED, "python"):
        names: dict[str, Any] = {}
        exec(compile(block, "docs/engines.md", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_a_checkpoint_of_the_demo_is_right_for_a_server() -> None:
    found = {one.name: one.status for one in examine(str(ROOT / "demo" / "model"), weights="never")}
    assert (found["stop tokens"], found["tool calls"], found["headers"]) == ("ok", "ok", "ok")


def test_the_environment_of_the_readme_answers_as_the_readme_says(tmp_path: Path) -> None:
    (code,) = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith(("#", "from"))]) <= 10
    row = a_row("Guess.", secret=42)
    one = hold(["50", "forty-two", "Not 42, but 41", " 42\n"], names["guess"], row=row)
    said = [message["content"] for message in one.messages if message["role"] == "user"]
    assert said == ["Guess.", "Lower!", "Higher!", "Higher!"]
    assert (one.stop, [turn.reward for turn in one.turns]) == ("done", [0.0, 0.0, 0.0, pytest.approx(0.4)])
    one = hold(["1", "²", "42"], lambda: names["guess"](tries=2), row=row)  # ends after the last try, with the reward 0
    assert (one.stop, [turn.reward for turn in one.turns]) == ("done", [0.0, 0.0])
    one = hold(["1", "42"], lambda: names["guess"](tries=2), row=row)
    assert (one.stop, [turn.reward for turn in one.turns]) == ("done", [0.0, 0.5])


def test_the_recipe_of_the_readme_is_valid_and_its_commands_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe,) = blocks(README, "yaml")
    config = Config.model_validate(yaml.safe_load(recipe))
    assert (config.train.steps, config.train.batch_size, config.train.group_size) == (100, 8, 8)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^turnwise \w+ .*guess.*$", README, re.MULTILINE)
    assert len(commands) == 3
    for line in commands:  # known commands and options, which miss nothing but their files
        assert main(line.partition("#")[0].split()[1:]) == 1
        assert "guess" in capsys.readouterr().err


def test_the_commands_in_the_text_of_pages_have_options_that_exist() -> None:
    found = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("demo/*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        found += re.findall(r"`turnwise (?:train|rollout|play) (recipes/\S+\.yaml)((?: [\w.]+=\S+?)+)`", text)
    assert ("recipes/composite_reward.yaml", " reward.trajectory.1.weight=0.05") in found
    for recipe, overrides in found:
        load(ROOT / recipe, overrides.split())


def test_old_names_lead_to_names_that_exist() -> None:
    for new in RENAMED.values():
        assert any(option == new or option.startswith(f"{new}.") for option in RULES), new
    for module in MOVED.values():
        assert importlib.util.find_spec(module) is not None, module


def test_the_pictures_of_the_readme_are_drawn_from_a_run(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "scripts" / "readme_images.py"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.75}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"step": 2, "reward/mean": 1.0}\n')
    picture = draw["curve"](tmp_path)
    assert 'points="400.0,197.5 740.0,92.5"' in picture  # half of the way at a reward of 0.25, all of it at 0.75
    assert ">0.50</text>" in picture
    assert ">1.00</text>" in picture


def test_every_link_of_the_pages_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_messages_and_recipes_name_pages_that_exist() -> None:
    files = [
        path
        for folder in ("src", "recipes", "deploy", ".github")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".yml")
    ]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert {(path, page) for path, page in named if not (ROOT / page).is_file()} == set()


def test_the_pages_name_files_that_are_there_and_the_readme_names_them() -> None:
    for page in (REWARDS, TRAINED, LIMITS):
        for target in re.findall(r"\]\(([\w./]+\.md)\)", page):
            assert (ROOT / "docs" / target).resolve().is_file(), target
    for name in ("rewards", "limits", "start"):
        assert f"(docs/{name}.md)" in README
    assert turnwise.__version__ != "unknown"


# The page about environments says what is true: its examples run.


DOCS = Path(__file__).parents[2] / "docs"

PAGE, LIBRARIES, TRL = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("environments.md", "environment_libraries.md", "trl.md")
)


def environments_blocks(language: str) -> list[str]:
    """The examples of the pages about environments, those of libraries and TRL."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE + LIBRARIES + TRL, re.MULTILINE | re.DOTALL)


def code(word: str) -> dict[str, Any]:
    """What the example defines that has this word in it."""
    (found,) = [block for block in environments_blocks("python") if word in block]
    names: dict[str, Any] = {}
    exec(compile(found, "docs/environments.md", "exec"), names)
    return names


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes the environments of the recipe that names something, from the directory where the page's files are."""
    for block in environments_blocks("python"):
        if (name := re.match(r"# (\w+\.py)\n", block)) is not None:
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)

    def make(word: str) -> Any:
        part = next(block for block in environments_blocks("yaml") if word in block)
        return assembly.environment_factory(
            Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **yaml.safe_load(part)})
        )

    return make


def test_an_interaction(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("A lot.", "100", "60"), recipe("market.py"), row=a_row(limit=80))
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 0.0, 0.75]
    assert (trajectory.turns[2].info, trajectory.stop) == ({"price": 60}, "done")
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert told[1:] == ["What is your price?", "100 is too much for me."]
    trajectory = hold(Says("90", "90", "90", "90", "60"), recipe("market.py"), row=a_row(limit=80))
    assert (trajectory.stop, len(trajectory.turns)) == ("done", 4)  # rounds: 4, so a fifth price is not asked for


def test_a_scripted_user() -> None:
    trajectory = hold(Says("a", "b", "c"), code("# user.py")["doubtful"])
    assert [one["content"] for one in trajectory.messages] == ["Hi", "a", "Are you sure?", "b", "Thank you.", "c"]


def test_a_class() -> None:
    trajectory = hold(Says("3", "2", "1"), code("# countdown.py")["Countdown"])
    assert ([turn.reward for turn in trajectory.turns], trajectory.stop) == ([0.25, 0.25, 0.25], "done")


def test_a_game(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("it is 5", "is it four", "five"), recipe("action: guess.py:last_word"), row=a_row(seed=1))
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert told == [
        "Hi\n\nI have a number from 0 to 9.",
        "Say a number from zero to nine, not 5.",
        "Right.",
    ]
    assert [turn.reward for turn in trajectory.turns] == [-0.1, 1.0]


def test_a_class_with_reset_and_step(recipe: Callable[[str], Any]) -> None:
    trajectory = hold(Says("shout hello", "bye"), recipe("shell.py"), row=a_row(name="Ann"))
    assert [one["content"] for one in trajectory.messages] == [
        "Hi\n\nGood day. I am Ann.",
        "shout hello",
        "HELLO",
        "bye",
    ]


def test_a_trl_environment(recipe: Callable[[str], Any]) -> None:
    said = [call("dial", '{"code": "x"}'), call("dial", '{"code": "12"}'), "Open."]
    trajectory = hold(Says(*said), recipe("vault.py"), row=a_row(code="12"))
    assert trajectory.messages[0]["content"] == "Hi Digits only."
    assert [one["content"] for one in trajectory.messages if one["role"] == "tool"] == [
        "Error: Only digits.",
        "It opens.",
    ]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]


def test_a_modelled_user(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = [block for block in environments_blocks("yaml") if "ModelledUser" in block]
    monkeypatch.setenv("USER_MODEL_KEY", "k")
    with serving(lambda question, number: Answer({"choices": [{"message": {"content": "[DONE]"}}]})) as server:
        tree = yaml.safe_load(part.replace("http://127.0.0.1:8000", server.url))
        make = assembly.environment_factory(
            Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **tree})
        )
        trajectory = hold(Says("a"), make, row=a_row(persona="Ann"))
    assert trajectory.stop == "done"
    assert server.asked[0]["messages"][0]["content"] == (
        "You are a customer of a shoe shop. Say [DONE] when you have what you want.\n\nAnn"
    )


def test_tools_in_front_of_an_interaction(recipe: Callable[[str], Any]) -> None:
    said = [call("calculator", '{"expression": "2+2"}'), "60"]
    trajectory = hold(Says(*said), recipe("tools: [turnwise.environments.calculator:calculator]"), row=a_row(limit=80))
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.75]


def test_the_tables_name_all_arguments() -> None:
    import inspect

    tables = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]+)\|", PAGE + LIBRARIES, re.MULTILINE))))
    for kind in (GymEnvironments, ModelledUser):
        assert set(inspect.signature(kind).parameters) <= tables, kind
    assert set(inspect.signature(ToolEnvironments).parameters) <= set(re.findall(r"\w+", LIBRARIES))


# The page about tools says what is true: its examples run, and its recipe is one.


TOOLS_PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def tools_blocks(language: str) -> list[str]:
    """The page's examples."""
    return re.findall(rf"^```{language}\n(.*?)^```", TOOLS_PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_with_a_class_runs(tmp_path: Path) -> None:
    (code,) = [block for block in tools_blocks("python") if block.startswith("# shop.py")]
    (recipe,) = [block for block in tools_blocks("yaml") if "shop.py:price" in block]
    (tmp_path / "shop.py").write_text(code)
    parts = yaml.safe_load(recipe.replace("shop.py", str(tmp_path / "shop.py")))
    make = assembly.environment_factory(
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **parts})
    )
    engine = Says(
        call("price", '{"item": "apple"}') + call("buy", '{"item": "apple", "count": 9}'),
        call("buy", '{"item": "pear", "count": 2}') + call("price", '{"item": "plum"}'),
        "#### 1",
    )
    trajectory = hold(engine, make, row=a_row(answer=1))
    assert [[one.content for one in turn.outcomes] for turn in trajectory.turns] == [
        ["0.5", "0.50 are left"],
        ["Error: only 0.50 are left", "Error: KeyError: plum"],
        [],
    ]
    assert (trajectory.stop, trajectory.error) == ("done", None)


def test_the_file_of_servers_is_one(tmp_path: Path) -> None:
    (example,) = tools_blocks("json")
    (tmp_path / "mcp.json").write_text(example)
    McpServers.from_file(tmp_path / "mcp.json").close()
    assert sorted(json.loads(example)["mcpServers"]) == ["files", "search"]


def test_the_table_of_options_names_them_all() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^- `tools\[\]\.(\w+)`", page, re.MULTILINE))
    assert named | {"use", "arguments"} == set(ToolUse.model_fields)


# The examples of docs/agents.md run as they are written: a GRPO training whose environment is a program.


AGENTS_PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """The block of code that begins with this line."""
    (text,) = [
        text
        for text in re.findall(r"^```\w+\n(.*?)^```", AGENTS_PAGE, re.MULTILINE | re.DOTALL)
        if text.startswith(start)
    ]
    return text


def agents_turnwise(folder: Path, *arguments: str) -> None:
    (folder / "agent.py").write_text(block("# agent.py"), encoding="utf-8")
    (folder / "solve.py").write_text(block("# solve.py"), encoding="utf-8")
    for name in ("demo",):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [sys.executable, "-m", "turnwise", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


@pytest.mark.slow
def test_the_program_of_the_page_is_trained_with_and_its_tokens_are_exact(tmp_path: Path) -> None:
    (tmp_path / "agent.yaml").write_text(block("# agent.yaml"), encoding="utf-8")
    small = ["train.steps=2", "train.batch_size=2"]  # each conversation is a process that imports a client library
    agents_turnwise(tmp_path, "train", "agent.yaml", *small)
    run = tmp_path / "runs" / "agent"
    trajectories = list(read(run))
    assert len(trajectories) == 2 * 8
    assert [trajectory.error for trajectory in trajectories if trajectory.error is not None] == []
    # the strict sanity check: what the loop appended is what the template writes for the messages of the requests
    assert not [
        found for t in trajectories if (found := t.template_mismatch) and found.kind is not MismatchKind.COMPLETION
    ]
    for trajectory in trajectories:
        assert len(trajectory.segments) == 1 + int(trajectory.metrics["agent/forked"])
        assert trajectory.metrics["agent/extended"] + trajectory.metrics["agent/realigned"] == len(trajectory.turns) - 1
    assert any(
        turn.calls for trajectory in trajectories for turn in trajectory.turns
    )  # the model calls the program's tool
    assert len({trajectory.reward for trajectory in trajectories}) == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line.get("loss") is not None]
    assert len(steps) == 2
    assert all(step["ratio/max_deviation"] < 1e-3 for step in steps)  # trainer and engine agree on every token
    assert all(step["metrics/agent/forked"] == 0 and step["failed"] == 0 for step in steps)
    assert any(step["tokens/trained"] > 0 for step in steps)


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("jq")), reason="the script of the page needs curl and jq"
)
def test_the_shell_script_of_the_page_asks_and_gives_rewards(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text(block("# agent.sh"), encoding="utf-8")
    program = Program(command=f"bash {tmp_path / 'agent.sh'}")
    try:
        found = hold_all(Says("It is 5."), program, size=1, row=a_row(answer="5"))
        found += hold_all(Says("It is 4."), program, size=1, row=a_row(answer="5"))
    finally:
        asyncio.run(program.aclose())
    assert [(one.error, one.turns[0].text, one.turns[0].reward) for one in found] == [
        (None, "It is 5.", 1.0),
        (None, "It is 4.", 0.0),
    ]


@pytest.mark.slow
def test_the_function_of_the_page_runs(tmp_path: Path) -> None:
    recipe = yaml.safe_load(block("# agent.yaml"))
    recipe |= yaml.safe_load(block("environment:\n  use: turnwise.environments.agents:AgentFunction"))
    recipe["data"] = {"train": "rows.jsonl"}
    del recipe["train"], recipe["output"]
    rows = (ROOT / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    agents_turnwise(tmp_path, "rollout", "recipe.yaml", "--out", "out")
    trajectories = list(read(tmp_path / "out"))
    assert trajectories
    assert [trajectory.error for trajectory in trajectories if trajectory.error is not None] == []
    assert {len(trajectory.turns) for trajectory in trajectories} == {2}


# The page about fine-tuning says what is true: its data is read, its recipe runs, its Python prints what is learnt.


SFT_PAGE = (ROOT / "docs" / "sft.md").read_text(encoding="utf-8")


def sft_block(language: str) -> str:
    """The page's example."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", SFT_PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / "conversations.jsonl").write_text(sft_block("json"))
    (tmp_path / "recipe.yaml").write_text(sft_block("yaml"))
    assert [len(row.messages) for row in read_conversations("conversations.jsonl")] == [4, 4, 2]
    assert main(["sft", "recipe.yaml", "sft.epochs=1"]) == 0
    assert (tmp_path / "runs/tuned/checkpoint/model.safetensors").is_file()
    capsys.readouterr()
    renderer = Renderer.from_pretrained("demo/model")
    for trajectory in asyncio.run(replay(read_conversations("conversations.jsonl"), renderer)):
        if weigh(trajectory):
            (segment,) = trajectory.segments
            columns = zip(segment.token_ids, segment.turn, strict=True)
            print(repr(renderer.decode([id for id, turn in columns if turn >= 0 and trajectory.turns[turn].weight])))
    call = '<tool_call>\\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\\n</tool_call><|im_end|>'
    assert capsys.readouterr().out.splitlines() == [
        f"'{call}It is 42.<|im_end|>'",
        "'No: it is 13.<|im_end|>'",
        "'4.<|im_end|>'",
    ]


# docs/doctor.md shows what the doctor says.


@pytest.mark.slow
def test_the_reports_in_the_documentation_are_those_of_the_doctor() -> None:
    page = comparable((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"))
    for name, text in doctor_reports().items():
        block = f"<!-- {name}: made by scripts/generated_pages.py -->\n\n```text\n{text}\n```\n"
        assert comparable(block) in page
        # 26 lines and the 7 of the template profile: a report fits on a screen
        assert len([line for line in text.splitlines() if line]) <= 33


def test_the_table_of_trl_has_every_field_of_grpo_config_and_options_that_exist() -> None:
    spec = importlib.util.find_spec("trl")  # read, not imported: that takes seconds
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text(encoding="utf-8")
    (config,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "GRPOConfig")
    fields = {n.target.id for n in config.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    table = page.partition("## All fields of GRPOConfig")[2].partition("\n## ")[0]
    second = [line.strip("| ").split(" | ")[1] for line in table.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", table))
    training = {
        "logging_steps",
        "gradient_checkpointing",
        "bf16",
        "learning_rate",
        "remove_unused_columns",
    }  # of the base class
    assert fields - training <= named
    options = {option for cell in second for option in re.findall(r"`([a-z_]+(?:\[\])?\.[a-z_.\[\]]+)", cell)}
    known = {part for option in RULES for part in (option, option.rpartition(".")[0])}
    assert options - known == set()


def test_a_column_chooses_the_environment_of_a_row() -> None:
    by_kind = code("# by_kind.py")["by_kind"]
    right = hold(Says("#### 7"), by_kind, row=a_row(kind="sum", answer="7"))
    assert ([turn.reward for turn in right.turns], right.stop) == ([1.0], "done")
    asked = hold(Says("a", "b"), by_kind, row=a_row(kind="talk"))
    assert [one["content"] for one in asked.messages] == ["Hi", "a", "Are you sure?", "b"]


def test_an_account_is_read_by_its_environment_and_rewards_are_added_to_the_replies_of_tools() -> None:
    def calls(*amounts: int) -> list[str]:
        return [call("withdraw", json.dumps({"amount": amount})) for amount in amounts]

    row = a_row(goal=10)
    trajectory = hold(Says(*calls(200, 90), "Done."), code("# bank.py")["bank"], row=row)
    assert [turn.rewards for turn in trajectory.turns] == [{"calls": -0.01}, {"calls": -0.01}, {"right": 1.0}]
    outcomes = [outcome for turn in trajectory.turns for outcome in turn.outcomes]
    assert [outcome.content for outcome in outcomes] == ["Error: There are only 100.", "10 are left."]
    assert [outcome.error is None for outcome in outcomes] == [False, True]
    many = hold(Says(*calls(1, 1, 1, 1, 1, 1)), code("# bank.py")["bank"], row=row)
    assert [turn.rewards for turn in many.turns] == 4 * [{"calls": -0.01}] + [{"right": 0.0}]
    poor = hold(Says("Hm."), code("# bank.py")["bank"], row=a_row(goal=7, amount=7))
    assert poor.turns[0].rewards == {"right": 1.0}
