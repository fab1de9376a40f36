"""Every argument of ms-swift is read as its kind, and an error names the argument, the value and the kind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from turnwise.compat.swift.convert import COMPUTED, from_swift_arguments
from turnwise.compat.swift.read_arguments import ARGUMENT_TYPES, OPTIONS
from turnwise.errors import ConfigError

FULL = "swift rlhf --rlhf_type grpo --model m --tuner_type full --dataset d.jsonl --use_hf true --max_steps 5 "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max_steps ten", "--max_steps: 'ten' is not an integer"),
        ("--num_generations 1.5", "--num_generations: '1.5' is not an integer"),
        ("--num_generations 0", "--num_generations: '0' is not an integer of at least 1"),
        ("--per_device_train_batch_size 0", "--per_device_train_batch_size: '0' is not an integer of at least 1"),
        (f"--max_steps {'9' * 40}", f"--max_steps: '{'9' * 40}' does not fit into 64 bits"),
        ("--max_steps 3 4", "--max_steps takes one value; there are 2: ['3', '4']"),
        ("--max_steps --beta 0", "--max_steps has no value; write --max_steps VALUE"),
        ("--beta nan", "--beta: 'nan' is not a number"),
        ("--adam_beta1 1,2", "--adam_beta1: '1,2' is not a number"),
        ("--num_train_epochs 0", "--num_train_epochs: '0' is not above 0"),
        ("--use_gym_env perhaps", "--use_gym_env: 'perhaps' is not true or false"),
        ("--columns [", "--columns: '[' is not a mapping in JSON"),
        ("--columns '{\"a\": 1}'", "--columns: '{\"a\": 1}' is not a mapping of texts"),
        ('--columns \'{"a": "b", "a": "c"}\'', "the key 'a' occurs twice"),
        ("--dataset a.jsonl#x", "--dataset a.jsonl#x: the number of rows: 'x' is not an integer"),
        ("--dataset a.jsonl#0", "--dataset a.jsonl#0: the number of rows: '0' is not an integer of at least 1"),
        ("--dataset '[[\"a\"]]'", "--dataset: ['a'] is not a text"),
        ("--reward_funcs accuracy --reward_weights half", "--reward_weights: 'half' is not a number"),
        ("NPROC_PER_NODE=0 swift rlhf --beta 0", "NPROC_PER_NODE: '0' is not an integer of at least 1"),
        ("'--a b' c", "'a b' is no name of an argument of ms-swift"),
    ],
)
def test_a_value_of_another_kind_is_an_error_with_its_argument(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_swift_arguments(shlex.split(words if words.startswith("NPROC") else FULL + words))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("args.json", "[[[", "args.json is not JSON"),
        ("args.yaml", f"beta: {'[' * 3000}", "args.yaml is not accepted: it is nested deeper than 64 levels"),
        ("args.yaml", "beta: 1\nbeta: 2\n", "args.yaml is not YAML"),
        ("args.yaml", "max_steps: [3, 4]\n", "--max_steps: [3, 4] is not an integer"),
        ("args.yaml", "model: {a: 1}\n", "--model: {'a': 1} is not a text"),
        ("args.sh", "swift rlhf args.sh\n", "args.sh is named twice, or names itself"),
        (
            "args.sh",
            "A=$A$A$A$A$A$A$A$A$A$A\n" * 40,
            "its variables grow beyond",
        ),
        ("args.sh", "swift rlhf --system 'a \\", "its quotation is never closed"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(
    name: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        from_swift_arguments([name])
    assert message in str(error.value)


def test_the_files_that_arguments_name_are_read_with_an_error_too(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_bytes(b"\xff")
    for words in (f"--system {bad}", f"--reward_funcs mine --external_plugins {bad}"):
        with pytest.raises(ConfigError, match=r"bad\.py is not UTF-8"):
            from_swift_arguments(shlex.split(FULL + words))


def test_every_argument_that_is_computed_with_or_becomes_an_option_has_a_kind() -> None:
    assert set(ARGUMENT_TYPES) >= {*OPTIONS, *COMPUTED}


def test_names_of_digits_and_stop_words_in_brackets_stay_texts(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"model": 7, "stop_words": ["[END]", "none?"], "num_generations": 8.0}))
    found = from_swift_arguments(file).recipe
    assert found["model"]["path"] == "7"
    assert found["sampling"]["stop"] == ["[END]", "none?"]
    assert found["train"]["group_size"] == 8
    words = from_swift_arguments(shlex.split(FULL + "--stop_words [END] 12 --beta null --seed 007")).recipe
    assert words["sampling"]["stop"] == ["[END]", "12"]
    assert (words["loss"]["kl_coef"], words["seed"]) == (0.04, 7)
