"""`turnwise doctor`: what it examines of a recipe, and the messages of each check."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from support import CHATML, byte_tokenizer
from support.families import family_renderer, template_files
from support.templates import NO_TOOLS, STRANGE_CALLS, THINKS
from support.tiny import save_rows
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.doctor.check import Check
from turnwise.doctor.examine import examine
from turnwise.doctor.options import take_effect
from turnwise.doctor.recipe import conversations, tools_and_rewards
from turnwise.doctor.template import contents, headers, openings
from turnwise.errors import DataError
from turnwise.options.section import Use

# `turnwise doctor`, from the command line to the exit status; models and recipes with one error each.


PLACES = Path(__file__).parent.parent / "support" / "places.py"

OF_A_MODEL = [
    "template",
    "headers",
    "contents",
    "tool turns",
    "user turns",
    "system turns",
    "thinking",
    "stop tokens",
    "tool calls",
    "tools shown",
    "round trip",
    "vocabulary",
    "mask",
    "cost",
    "credit",
    "log-probs",
]


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def write_recipe(path: Path, rows: Path | None = None, **more: Any) -> Path:
    options = {
        "data": {"train": str(rows or save_rows(path / "rows.jsonl", 3))},
        "environment": f"{PLACES}:low_bytes",
        "train": {"batch_size": 2, "group_size": 2},
        **more,
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(options))
    return path / "recipe.yaml"


def asked(model: Path | str, recipe: Path | None = None, *overrides: str, **options: Any) -> dict[str, Check]:
    config = None if recipe is None else load(recipe, [f"model.path={model}", *overrides])[0]
    return {one.name: one for one in examine(str(model), config, **options)}


def only_failure(checks: dict[str, Check]) -> str:
    (wrong,) = [one for one in checks.values() if one.status == "fail"]
    return wrong.text


# the command


def test_a_good_model_is_reported_on_a_page(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 29
    checks = [line for line in lines if not line.startswith(" ")]
    assert [line[6:20].strip() for line in checks[:-1]] == OF_A_MODEL
    assert checks[-1].endswith(", failures: 0")
    assert checks[-1].startswith("ready for training: ")
    profile = ["content", "tools", "tool calls", "call text", "model turn", "turn ends with", "reasoning"]
    runs = ["context", "turn 0", "context", "turn 1"]
    assert [line[6:20].strip() for line in lines if line.startswith(" ")] == [*profile, *runs]


@pytest.mark.slow
def test_a_recipe_adds_what_it_does_with_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    assert main(["doctor", str(model), "--recipe", str(recipe), "loss_mask=last_turn", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["checks"]] == ["options", *OF_A_MODEL, "rows", "rewards", "memory"]
    assert (found["model"], found["status"]) == (str(model), "note" if "note" in str(found["checks"]) else "ok")
    (mask,) = [one for one in found["checks"] if one["name"] == "mask"]
    assert [(run["turn"], run["weight"]) for run in mask["runs"]] == [(-1, 0.0), (0, 0.0), (-1, 0.0), (1, 1.0)]


def test_the_exit_status_is_1_where_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("fail  model  the directory ")
    assert out.endswith("not ready for training: 0 ok, notes: 0, failures: 1\n")


@pytest.mark.slow
def test_the_model_of_a_recipe_need_not_be_given(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    words = ["--recipe", str(recipe), "--weights", "never", "--json"]
    main(["doctor", f"model.path={model}", "loss_mask=last_turn", *words])
    one = json.loads(capsys.readouterr().out)
    main(["doctor", str(model), "loss_mask=last_turn", *words])
    assert (one["model"], one) == (str(model), json.loads(capsys.readouterr().out))
    assert main(["doctor"]) == 1
    assert "there is no model to check: give MODEL" in capsys.readouterr().err


def test_overrides_need_a_recipe(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(model), "train.lr=1"]) == 1
    assert "train.lr=1 is an option of a recipe, and no recipe is given: add --recipe FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no recipe"),
        ("- a\n- b\n", "must contain a mapping of options; it contains a list"),
        ("train: {lr: [", "is not YAML"),
        ("\x89PNG", "is not UTF-8"),
        ("data: {train: x}\ntrain: {lrr: 1}\n", "there is no option train.lrr; did you mean 'lr'?"),
    ],
)
def test_an_invalid_recipe_is_an_error(
    text: str | None, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text, encoding="latin-1")
    assert main(["doctor", str(model), "--recipe", str(recipe)]) == 1
    assert message in capsys.readouterr().err


# models with one error


def tokenizer(template: str | None, **tokens: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        made = byte_tokenizer(template)
        for name, value in tokens.items():
            setattr(made, name, value)
        shutil.rmtree(path)
        made.save_pretrained(path)

    return save


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


def test_a_model_that_is_not_there_is_named_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "./nosuch"]) == 1
    assert f"MODEL ./nosuch: there is no model directory {Path('nosuch').absolute()}; a model is a hub id" in " ".join(
        capsys.readouterr().out.split()
    )


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("spoil", "value", "rule", "fix"),
    [
        (
            shutil.rmtree,
            "there is no model directory /",
            "a model is a hub id",
            "a directory that save_pretrained has written",
        ),
        (
            lambda path: [file.unlink() for file in path.iterdir()],
            "/copy' has no tokenizer",
            "a model is a hub id",
            "a directory that save_pretrained has written",
        ),
        (
            tokenizer(None),
            "/copy has no chat template",
            "cannot be turned into tokens",
            "Put a chat_template.jinja into",
        ),
        (
            tokenizer("{% for m in messages %}{{ m.content }"),
            "in line 1",
            "is no valid Jinja",
            "copy/chat_template.jinja",
        ),
        (tokenizer(PLAIN, eos_token=None), "closes a turn with '\\n'", "not a special token", "Set eos_token"),
        (
            overwrite("tokenizer.json", "{"),
            "/copy'",
            "no tokenizer could be loaded",
            "A model is a hub id, or a directory",
        ),
        (
            overwrite("tokenizer.json", "{}"),
            "/copy'",
            "no tokenizer could be loaded",
            "A model is a hub id, or a directory",
        ),
        (
            overwrite("tokenizer_config.json", "["),
            "/copy'",
            "no tokenizer could be loaded",
            "A model is a hub id, or a directory",
        ),
        (
            overwrite("config.json", "[]"),
            "/copy'",
            "no tokenizer could be loaded",
            "A model is a hub id, or a directory",
        ),
        (
            overwrite("generation_config.json", "{"),
            "generation_config.json",
            "cannot be read",
            "Correct it, or remove it",
        ),
        (
            overwrite("model.safetensors", "x" * 99),
            "/copy'",
            "no model could be loaded",
            "A model is a hub id, or a directory",
        ),
    ],
    ids=[
        "no directory",
        "empty",
        "no template",
        "syntax",
        "no eos",
        "tokenizer cut short",
        "tokenizer empty",
        "tokenizer config",
        "config",
        "generation config",
        "weights",
    ],
)
def test_an_invalid_model_fails_with_value_rule_and_fix(
    spoil: Callable[[Path], None], value: str, rule: str, fix: str, copy: Path
) -> None:
    spoil(copy)
    message = only_failure(asked(copy))
    assert value in message
    assert rule in message
    assert fix in message
    assert "\n" not in message


def test_a_file_in_place_of_a_directory_fails(copy: Path) -> None:
    assert "config.json is a file; a model is a hub id" in only_failure(asked(copy / "config.json"))


@pytest.mark.slow
def test_a_tokenizer_of_another_model_fails(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    checks = asked(copy, weights="never")
    assert "but the model's embedding has 100 rows" in only_failure(checks)
    assert checks["log-probs"].text == "not checked, because of --weights never"


@pytest.mark.slow
def test_without_weights_all_other_checks_run(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    checks = asked(copy)
    assert list(checks) == OF_A_MODEL
    assert checks["log-probs"].status == "note"
    assert checks["log-probs"].text == f"not checked: there are no weights in {copy}"
    assert only_failure(asked(copy, weights="always")).startswith(f"there are no weights in {copy}: ")


# the model with its weights


@pytest.mark.slow
def test_trainer_engine_and_a_plain_pass_agree_at_step_0(model: Path) -> None:
    found = asked(model)["log-probs"]
    assert found.status == "ok"
    assert "tokens of 6 conversations" in found.text
    assert found.text.endswith("(tolerance for float32: 0.001)")


@pytest.mark.slow
def test_they_agree_with_filters_too(model: Path, tmp_path: Path) -> None:
    filters = ["sampling.temperature=0.7", "sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.01"]
    assert asked(model, write_recipe(tmp_path), *filters)["log-probs"].status == "ok"


def test_a_model_whose_outputs_are_random_fails() -> None:
    from support.conversations import RENDERER
    from support.tiny import tiny_model
    from turnwise.doctor.weights import round_trip
    from turnwise.types import Sampling

    assert round_trip(tiny_model(attention_dropout=0.5), RENDERER, Sampling()).status == "ok"
    found = round_trip(tiny_model(attention_dropout=0.5).train(), RENDERER, Sampling())
    assert found.status == "fail"
    assert "training would use other probabilities than sampling. Please report it" in found.text


def test_what_bfloat16_explains_grows_with_the_logits() -> None:
    from support.conversations import RENDERER
    from support.tiny import tiny_model
    from turnwise.doctor.weights import round_trip
    from turnwise.types import Sampling

    def tolerance(largest: float) -> float:
        model = tiny_model(tie_word_embeddings=False)
        with torch.no_grad():
            present = model(torch.arange(40)[None]).logits.abs().amax()
            model.lm_head.weight.mul_(largest / present)
        found = round_trip(model.to(torch.bfloat16), RENDERER, Sampling(), threads=1)
        assert found.status == "ok"
        return float(found.text.removesuffix(")").rsplit("tolerance for bfloat16: ", 1)[1])

    assert tolerance(5.0) == 0.5
    assert 0.6 < tolerance(40.0) < 1.3  # 0.87 for 40; the logits of the sampled tokens differ a little from these


@pytest.mark.slow
def test_weights_that_are_missing_or_nan_are_named(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    damaged = weights[name].clone()
    damaged[0, 0] = float("nan")
    for change, message in (
        ({key: value for key, value in weights.items() if key != name}, f"the checkpoint lacks the weight {name}"),
        ({**weights, name: damaged}, f"the weight {name} holds values that are NaN or infinite"),
    ):
        save_file(change, copy / "model.safetensors", metadata={"format": "pt"})
        assert message in only_failure(asked(copy))


def test_ratios_that_are_nan_do_not_agree() -> None:
    from turnwise.doctor.weights import _off

    assert _off(torch.tensor([0.0, float("nan")]), torch.zeros(2)) == float("inf")


# recipes with one error


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        (
            [{"role": "wizard", "content": "x"}],
            NO_TOOLS,
            "has the role 'wizard'; the roles are: system, developer, user,",
        ),
        ([{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}], CHATML, "smell"),
        ([{"role": "user", "content": 7}], CHATML, "has the content 7; content is a text"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "rows.jsonl"}]}],
            CHATML,
            "cannot be read as an image",
        ),
    ],
    ids=["role", "part", "content", "image"],
)
def test_messages_that_the_template_refuses_are_reported_with_their_row(
    messages: list[dict[str, Any]], template: str, message: str, copy: Path, tmp_path: Path
) -> None:
    byte_tokenizer(template).save_pretrained(copy)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    config, _ = load(write_recipe(tmp_path, tmp_path / "rows.jsonl"), [f"model.path={copy}"])
    try:
        text = openings(config, assembly.rows(config), Renderer.from_pretrained(copy)).text
    except DataError as error:  # the file itself is refused
        text = str(error)
    assert message in text
    assert "row '1'" in text or "rows.jsonl:1" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "override", "check", "message"),
    [
        (CHATML, "thinking=branch", "thinking", "thinking=branch has no effect"),
        (CHATML, "thinking=strip_at_user", "thinking", "thinking=strip_at_user has no effect"),
        (
            STRANGE_CALLS,
            "tools=[turnwise.environments.calculator:calculator]",
            "tool calls",
            "in a format that cannot be read back",
        ),
        (CHATML, "loss.clip_high=0.3", "options", "has no effect with one optimizer step a batch"),
        (CHATML, "sft.lr=0.1", "options", "environment="),
        (CHATML, "environment=nowhere.py:x", "rewards", "environment: there is no file"),
        (CHATML, f"environment={PLACES}:always_raises", "rewards", "no luck today"),
        (CHATML, "data.train=nowhere.jsonl", "rows", "nowhere.jsonl"),
        (CHATML, "data.return_multi_modal_inputs=true", "rows", "has no effect: no row contains an image"),
        (CHATML, "loss_mask=nowhere.py:x", "mask", "loss_mask: there is no file"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_fails(
    template: str, override: str, check: str, message: str, copy: Path, tmp_path: Path
) -> None:
    byte_tokenizer(template).save_pretrained(copy)
    found = asked(copy, write_recipe(tmp_path), override, weights="never")[check]
    assert found.status == "fail"
    assert message in found.text


@pytest.mark.slow
def test_the_option_thinking_is_used_in_all_checks(copy: Path, tmp_path: Path) -> None:
    byte_tokenizer(THINKS).save_pretrained(copy)
    for policy in ("branch", "strip_at_user"):
        checks = asked(copy, write_recipe(tmp_path), f"thinking={policy}")
        assert [one.text for one in checks.values() if one.status == "fail"] == []
        assert checks["thinking"].text.startswith(f"thinking={policy}: ")


def test_an_option_that_makes_no_difference_is_a_note(model: Path, tmp_path: Path) -> None:
    found = take_effect(load(write_recipe(tmp_path), ["data.max_rows=1000", f"model.path={model}"])[0])
    assert found.status == "note"
    assert found.text.endswith("it makes no difference here to leave out data.max_rows")


def test_a_default_that_a_recipe_writes_down_is_no_note(model: Path, tmp_path: Path) -> None:
    """Its null stands for it: 100 steps, the name of a function, the layers of an adapter."""

    def told(*overrides: str) -> Check:
        reward = {"trajectory": [{"use": f"{PLACES}:length"}]}
        return take_effect(load(write_recipe(tmp_path, reward=reward), [f"model.path={model}", *overrides])[0])

    modules = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    defaults = ["train.steps=100", "reward.trajectory.0.name=length", f"model.lora.target_modules={modules}"]
    adapter = "model.lora.rank=4"
    assert told(adapter, *defaults) == told(adapter)
    assert told(adapter).status == "ok"
    others = [
        "train.steps=99",
        "reward.trajectory.0.name=other",
        f"model.lora.target_modules={modules.replace('q_proj, ', '')}",
    ]
    sets, left_out = (
        [int(number) for number in re.findall(r"(\d+) (?:are set|were left out)", told(adapter, *words).text)]
        for words in ([], others)
    )
    assert [after - before for before, after in zip(sets, left_out, strict=True)] == [3, 3]


@pytest.mark.parametrize(
    ("columns", "parameters", "status", "told"),
    [
        ("question solution", "answer, solution", "fail", "it has none of the parameters trajectory, completion, "),
        (
            "question solution",
            "completion, soluton",
            "fail",
            "nor a column of the data (question, solution); did you mean",
        ),
        ("question solution", "completion, solution", "note", "because {} fails"),
        ("prompt solution", "completion, prompt", "fail", "has the parameter 'prompt', which is neither a value"),
        ("prompt solution", "completion, solution", "note", "because {} fails"),
        (None, "completion, soluton", "note", "can be called, if the data has the columns that they need: "),
        (None, "soluton", "fail", "it has none of the parameters trajectory, completion, "),
    ],
)
@pytest.mark.parametrize("with_model", [False, True])
def test_reward_functions_are_checked_also_where_there_are_no_conversations(
    columns: str | None, parameters: str, status: str, told: str, with_model: bool, model: Path, tmp_path: Path
) -> None:
    """`columns` are those of the rows; None: the file is not there."""
    if with_model and columns is not None and "prompt" in columns:
        return  # nothing fails
    rows = tmp_path / "flat.jsonl"
    if columns is not None:
        rows.write_text(json.dumps(dict.fromkeys(columns.split(), "no")) + "\n")
    (tmp_path / "own.py").write_text(f"def score({parameters}):\n    return 1.0\n")
    recipe = write_recipe(tmp_path, rows, reward={"trajectory": [f"{tmp_path / 'own.py'}:score"]})
    found = asked(model if with_model else tmp_path / "none", recipe, weights="never")
    readable = columns is not None and "prompt" in columns
    assert ("model" in found) != with_model
    assert found["rows"].status == ("note" if readable else "fail")
    assert (found["rows"].text == "1 row can be read; not tried in the template, because model fails") == readable
    assert found["rewards"].status == status
    assert told.format("model" if readable else "rows") in found["rewards"].text
    assert all("\n" not in check.text for check in found.values())


def test_functions_of_the_user_are_checked_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def wrong(groups):\n    return None\n\n\ndef loss(logprob_N, targets):\n    return logprob_N\n"
    )
    recipe = write_recipe(tmp_path, credit=f"{tmp_path / 'own.py'}:wrong", loss=f"{tmp_path / 'own.py'}:loss")
    found = asked(tmp_path / "none", recipe)
    assert list(found) == ["options", "model", "rows", "estimator", "loss", "memory"]  # and no reward function


def test_a_mapped_column_that_is_missing_is_no_mistake_of_a_function(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(completion, answer):\n    return 1.0\n")
    data = {"train": str(save_rows(tmp_path / "rows.jsonl", 3)), "columns": {"answer": "solution"}}
    recipe = write_recipe(tmp_path, data=data, reward={"trajectory": [f"{tmp_path / 'own.py'}:score"]})
    found = asked(model, recipe, weights="never")
    assert "has no column 'solution'" in only_failure(found)
    assert found["rewards"].status == "note"


def test_the_tools_are_named_by_what_gives_them(model: Path, tmp_path: Path) -> None:
    server = {"command": sys.executable, "args": ["-I", "-S", str(PLACES.parent / "small_mcp_server.py")]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"pump": server, "idle": server}}))
    (tmp_path / "own.py").write_text(
        "from turnwise import Opening, Reply\n\n\n"
        "class Offers:\n"
        "    async def begin(self, row):\n"
        "        tool = {'type': 'function', 'function': {'name': 'peek', 'description': '', 'parameters': {}}}\n"
        "        return Opening(messages=row.messages, tools=[tool])\n\n"
        "    async def step(self, turn):\n"
        "        return Reply(reward=1.0, done=True)\n\n"
        "    async def close(self): ...\n"
    )
    # names of two servers must differ, so that one of these gives its prompts only
    mcp = {"servers": str(tmp_path / "mcp.json"), "select": [], "also": ["prompts"]}
    tools = ["turnwise.environments.calculator:calculate"]
    environment = f"{tmp_path / 'own.py'}:Offers"
    config, _ = load(write_recipe(tmp_path, environment=environment, tools=tools, mcp=mcp), [f"model.path={model}"])
    found, _ = tools_and_rewards(config, assembly.rows(config), Renderer.from_pretrained(str(model)), None)
    assert (found.status, found.text) == (
        "ok",
        "6 tools: turnwise.environments.calculator:calculate gives calculate; MCP server pump gives pump_list_prompts, "
        "pump_get_prompt; MCP server idle gives idle_list_prompts, idle_get_prompt; "
        f"environment={environment} gives peek",
    )
    without, _ = load(write_recipe(tmp_path), [f"model.path={model}"])
    (only,) = tools_and_rewards(without, assembly.rows(without), Renderer.from_pretrained(str(model)), None)
    assert only.name == "rewards"


@pytest.mark.slow
def test_rewards_of_the_recipe_are_followed_to_the_loss(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, reward={"trajectory": [{"use": f"{PLACES}:length", "weight": 0.5}]})
    for options in ({"weights": "never"}, {}):
        for override in ("loss.normalizer=trajectory", "loss_mask=last_turn"):
            found = asked(model, recipe, override, **options)["rewards"]
            assert found.status == "ok", found.text
            assert found.text.startswith("4 conversations with the rewards -")
            assert found.text.endswith("(scripted completions, because the model is not loaded)") == bool(options)


@pytest.mark.slow
def test_rewards_that_are_all_equal_are_a_note_with_the_values_of_each_function(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        environment={"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.5}},
        reward={"trajectory": [{"use": f"{PLACES}:length", "weight": 0.0, "name": "short"}]},
    )
    found = asked(model, recipe)["rewards"]
    assert (found.status, "The rewards are all equal" in found.text) == ("note", True)
    assert f"environment={PLACES}:indifferent: 0.5, 0.5, 0.5, 0.5; short: " in found.text
    assert asked(model, recipe, weights="never")["rewards"].status == "ok"  # scripted: the values mean nothing


@pytest.mark.slow
def test_failed_conversations_are_a_note_if_others_succeed(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, environment=f"{PLACES}:raises_now_and_then")
    found = asked(model, recipe, weights="never")["rewards"]
    assert found.status == "note"
    assert "other conversations failed (2): " in found.text
    assert "row 1 does not suit me" in found.text


def test_a_recipe_for_fine_tuning_is_checked_for_that_command(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "said.jsonl"
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(3)))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"data": {"train": str(rows)}, "sft": {"lr": 0.1}}))
    config, _ = load(tmp_path / "recipe.yaml", [f"model.path={model}"])
    assert take_effect(config).text.startswith("4 are set: ")  # with model.dtype, which `load` resolves for the machine
    assert conversations(config).text.startswith("3 conversations for training can be read")
    found = take_effect(config.model_copy(update={"environment": Use(use="x.py:y")}))
    assert found.text.startswith("environment=x.py:y has no effect in fine-tuning")


# The checks `headers` and `contents`: a good template, and templates with one error each.


PROMPT = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def renderer(template: str = CHATML) -> Renderer:
    return Renderer(byte_tokenizer(template))


def test_turns_that_begin_with_the_generation_prompt_are_ok() -> None:
    found = headers(renderer())
    assert (found.status, found.text) == (
        "ok",
        "assistant messages begin with the generation prompt '<|im_start|>assistant\\n'",
    )


def test_turns_without_a_header_need_no_generation_prompt() -> None:
    mistral = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}"
    )
    found = headers(renderer(mistral))
    assert (found.status, found.text) == (
        "ok",
        "assistant messages have no header, so no generation prompt is needed",
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            CHATML.removesuffix(PROMPT),
            "the template writes '<|im_start|>assistant\\n' before an assistant message, but writes nothing if "
            "add_generation_prompt is true, so the model would generate without its header",
            id="no generation prompt",
        ),
        pytest.param(
            CHATML.replace(PROMPT, PROMPT.replace("assistant", "model")),
            "the generation prompt is '<|im_start|>model\\n', but an assistant message begins with "
            "'<|im_start|>assistant\\n'",
            id="another header than the turns have",
        ),
        pytest.param(
            "{{ bos_token }}{{ bos_token }}" + CHATML,
            "the template begins a conversation with two BOS tokens '<|endoftext|>' (0)",
            id="BOS twice",
        ),
        pytest.param(
            CHATML.replace("<|im_start|>", "<|header|>"),
            "headers that are not special tokens of this tokenizer: '<|header|>' (10 tokens)",
            id="headers that are not tokens",
        ),
    ],
)
def test_wrong_headers_fail(template: str, message: str) -> None:
    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    found = headers(Renderer(tokenizer))
    assert found.status == "fail"
    assert message in found.text


def test_unchanged_contents_are_ok() -> None:
    assert (contents(renderer()).status, contents(renderer(NO_TOOLS)).status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[:100]", "becomes '<|im_end|>"),
        (" | e", "becomes '&lt;b&gt;&amp;amp;&l'"),
        (" | replace('\\n\\n', '\\n')", "becomes '<b>&amp;</b>"),
    ],
)
def test_contents_that_are_cut_or_changed_fail(change: str, message: str) -> None:
    template = NO_TOOLS.replace("{{ message.content }}", f"{{{{ message.content{change} }}}}")
    found = contents(renderer(template))
    assert found.status == "fail"
    assert message in found.text


def test_removed_white_space_is_a_note() -> None:
    found = contents(renderer(NO_TOOLS.replace("{{ message.content }}", "{{ message.content | trim }}")))
    assert found.status == "note"
    assert "removes white space at both ends of messages with the roles system, user, assistant." in found.text
    assert "In training, the white space in a sampled completion is kept" in found.text


@pytest.mark.parametrize("file", template_files(), ids=lambda file: file.stem)
def test_headers_and_contents_of_model_families_do_not_fail(file: Path) -> None:
    found = family_renderer(file)
    assert headers(found).status == "ok", headers(found).text
    assert contents(found).status != "fail", contents(found).text
