"""`turnwise dataset`: which conversations become rows, and that the rows are what TRL's trainers and `turnwise sft` read."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.record import datasets
from turnwise.record.datasets import DatasetChoice, Kind, rows_of, write_dataset
from turnwise.types import Row, Segment, Stop, ToolCall, Trajectory, Turn

SAMPLED = ("rollout.max_rows=6", "rollout.samples_per_row=4")
ROOT = Path(__file__).parents[2]
ROW = Row(id="r", messages=[{"role": "user", "content": "6 * 7?"}])
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def conversation(name: str, reward: float | None, *, answers: Sequence[str] | None = None) -> Trajectory:
    """A turn that calls a tool, its result, and an answer: 3 prompt tokens, turns of 2 tokens, 1 token between them."""
    first, last = answers or (f"call {name}", f"answer {name}")
    one = Trajectory(id=name, group="g", row=ROW, tools=TOOLS, stop=Stop.DONE, reward=reward)
    one.messages = [
        *ROW.messages,
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": last},
        {"role": "user", "content": "Thanks."},
    ]
    one.turns = [
        Turn(index=0, message=one.messages[1], text=first, message_index=1),
        Turn(index=1, message=one.messages[3], text=last, message_index=3),
    ]
    number = sum(map(ord, name))
    one.segments = [
        Segment(
            token_ids=array("i", [1, 2, 3, number, 4, 5, number + 1, 4, 6]),
            turn=array("i", [-1, -1, -1, 0, 0, -1, 1, 1, -1]),
        )
    ]
    return one


def rows(
    group: Sequence[Trajectory], what: Kind = "sft", left_out: Counter[str] | None = None, **more: Any
) -> list[Any]:
    found = list(rows_of(group, DatasetChoice(what=what, **more), Counter[str]() if left_out is None else left_out))
    return json.loads(json.dumps(found))


GROUP = [conversation(name, reward) for name, reward in (("a", 0.0), ("b", 1.0), ("c", 0.5), ("d", 0.25))]


def test_the_best_of_a_group_is_a_row_with_messages_weights_tools_and_tokens() -> None:
    (row,) = rows(GROUP)
    assert row == {
        "messages": GROUP[1].messages[:4],
        "weights": [1.0, 1.0],
        "tools": json.dumps(TOOLS),
        "id": "b",
        "group": "g",
        "reward": 1.0,
        "input_ids": [1, 2, 3, 98, 4, 5, 99, 4],
        "assistant_masks": [0, 0, 0, 1, 1, 0, 1, 1],
    }
    masked = conversation("m", 1.0)
    masked.turns[1].weight = 0.0
    (row,) = rows([masked, GROUP[0]])
    assert (row["weights"], row["assistant_masks"]) == ([1.0, 0.0], [0, 0, 0, 1, 1])
    assert row["input_ids"] == [1, 2, 3, 109, 4]


def test_how_many_and_how_good_the_best_are() -> None:
    def ids(**more: Any) -> list[str]:
        return [row["id"] for row in rows(GROUP, **more)]

    assert ids(best=3) == ["b", "c", "d"]
    assert ids(best=4) == ["b", "c", "d"]  # the lowest is not above the lowest
    assert ids(best=4, min_reward=0.25) == ["b", "c", "d"]
    assert ids(best=4, min_reward=0.0) == ["b", "c", "d", "a"]
    assert ids(min_reward=1.5) == []
    equal = [conversation(name, 1.0) for name in "ab"]
    assert rows(equal) == []
    assert [row["id"] for row in rows(equal, min_reward=1.0, best=2)] == ["a", "b"]
    twins = [conversation(name, 1.0, answers=("call", "42")) for name in "ab"]
    assert [row["id"] for row in rows([*twins, GROUP[0]], best=2, min_reward=0.5)] == ["a"]


def test_pairs_are_of_one_prompt_by_margin_each_conversation_once() -> None:
    def pairs(group: Sequence[Trajectory] = GROUP, **more: Any) -> list[tuple[str, str]]:
        return [(row["id"], row["rejected_id"]) for row in rows(group, "dpo", **more)]

    assert pairs() == [("b", "a")]
    assert pairs(pairs=5) == [("b", "a"), ("c", "d")]
    assert pairs(pairs=5, margin=0.5) == [("b", "a")]
    assert pairs([conversation("a", 0.1 + 0.2), conversation("b", 0.3)]) == []
    other = conversation("o", 0.0)
    other.messages[0] = {"role": "user", "content": "another question"}
    assert pairs([other, GROUP[1]]) == []
    (row,) = rows(GROUP, "dpo")
    assert [len(row[name]) for name in ("prompt", "chosen", "rejected")] == [1, 3, 3]
    assert (row["prompt_ids"], row["chosen_ids"]) == ([1, 2, 3], [98, 4, 5, 99, 4])
    assert (row["chosen_reward"], row["rejected_reward"], row["tools"]) == (1.0, 0.0, json.dumps(TOOLS))
    (row,) = rows(GROUP, "reward-model")
    assert row["chosen_ids"] == [1, 2, 3, 98, 4, 5, 99, 4]
    assert "prompt_ids" not in row


def test_a_label_compares_with_the_mean_of_the_group_or_with_a_threshold() -> None:
    def labels(**more: Any) -> dict[str, bool]:
        return {row["id"]: row["label"] for row in rows(GROUP, "kto", **more)}

    assert labels() == {"a": False, "b": True, "c": True, "d": False}  # the mean is 0.4375
    found = rows_of(GROUP, DatasetChoice(what="kto", label="good"), Counter(), {("b", None), ("c", None)})
    assert {row["id"]: row["label"] for row in found} == {"b": True, "c": True}  # of all four, whatever has the label
    assert labels(threshold=1.0) == {"a": False, "b": True, "c": False, "d": False}
    assert rows([conversation(name, 1.0) for name in "ab"], "kto") == []


def test_what_messages_do_not_show_is_left_out_with_the_reason() -> None:
    failed, malformed, cut, two = (conversation(name, 2.0) for name in "fmct")
    failed.reward = None
    malformed.turns[0].calls = (ToolCall(id="1", name="f", arguments={}, text="{", error="no JSON"),)
    cut.turns[1].finish_reason = "length"
    two.segments.append(Segment(token_ids=array("i", [7, 8]), turn=array("i", [-1, 1])))
    left_out = Counter[str]()
    group = [failed, malformed, cut, two, *GROUP]
    (row,) = rows(group, "dpo", left_out)
    assert (row["id"], row["rejected_id"]) == ("b", "a")
    assert sorted(left_out.values()) == [1, 1, 1]
    assert "have several segments" in " ".join(left_out)
    assert {row["id"] for row in rows(group, "kto") if row["label"]} == {"b"}
    # each segment is a row of its own; a turn is trained on in one of them
    two.segments[0].turn = array("i", [-1, -1, -1, 0, 0, -1, -1, -1, -1])
    first, second = rows(group)
    assert (len(first["messages"]), first["weights"], first["input_ids"]) == (2, [1.0], [1, 2, 3, 116, 4])
    assert (len(second["messages"]), second["weights"], second["input_ids"]) == (4, [0.0, 1.0], [7, 8])


@pytest.mark.parametrize(("policy", "why"), [("", "train=False"), ("first", "policy first")])
def test_agents_that_are_not_trained_on_are_left_out(policy: str, why: str) -> None:
    referee = conversation("r", 3.0)
    referee.trained, referee.policy = False, policy
    for what in ("sft", "dpo", "kto"):
        left_out = Counter[str]()
        assert "r" not in {row["id"] for row in rows([referee, *GROUP], what, left_out)}
        assert left_out == {f"are of agents that are not trained on ({why})": 1}


def test_half_of_a_surrogate_pair_is_left_out_and_a_file_that_exists_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = conversation("h", 2.0)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"text": "\ud83d"}}}
    half.messages[1] = {**half.messages[1], "tool_calls": [call]}
    left_out = Counter[str]()
    (row,) = rows([half, *GROUP], "sft", left_out)
    assert row["id"] == "b"
    assert left_out == {"have half of a surrogate pair, which is no character, in a text": 1}
    # a disk that is full leaves nothing that blocks the next call
    monkeypatch.setattr(datasets, "read", lambda _: iter(GROUP))
    with monkeypatch.context() as full:

        def fail(file: Path, text: str, **_: Any) -> None:
            file.touch()
            raise OSError("No space left on device")

        full.setattr(Path, "write_text", fail)
        with pytest.raises(OSError, match="No space left"):
            write_dataset(tmp_path, tmp_path / "out", DatasetChoice(what="sft"))
    assert list((tmp_path / "out").iterdir()) == []
    assert write_dataset(tmp_path, tmp_path / "out", DatasetChoice(what="sft")).rows == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.jsonl"]


def test_groups_without_a_pair_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = [replace(one, group="equal") for one in (conversation("e", 1.0), conversation("f", 1.0))]
    alone = [replace(conversation("x", 1.0), group="alone")]
    monkeypatch.setattr(datasets, "read", lambda _: iter([*GROUP, *equal, *alone]))
    assert main(["dataset", str(tmp_path), "--out", str(tmp_path / "out"), "--what", "dpo"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 row of 3 groups" in told
    assert "2 groups without a pair: equal rewards, a difference below --margin, or fewer than two" in told


def test_a_data_set_is_written_once_and_never_empty(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_text("", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"no conversation of .* becomes a row of --what kto: 0 groups were read.*--threshold"
    ):
        write_dataset(file, tmp_path / "out", DatasetChoice(what="kto"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists already"):
        write_dataset(file, tmp_path / "out", DatasetChoice(what="kto"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--what", "sft", "--margin", "1"],
            "--margin has no effect with --what sft: remove it, or use --what dpo or reward-model",
        ),
        (["--what", "kto", "--min-reward", "1"], "--min-reward has no effect with --what kto"),
        (["--what", "dpo", "--margin", "-1"], "--margin -1 is below 0"),
        (["--what", "dpo"], "there is no file"),
    ],
)
def test_arguments_without_effect_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dataset", str(tmp_path / "none"), "--out", str(tmp_path / "out"), *words]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainers_of_trl_train_on_the_tokens_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets as hf_datasets
    import trl
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    assert main(["rollout", "recipes/calculator.yaml", *SAMPLED, "--out", str(run)]) == 0
    tokenizer = AutoTokenizer.from_pretrained("demo/model")

    def trained(what: Kind, trainer: str, config: str, model: Any = "demo/model") -> tuple[Any, list[Any]]:
        """The rows as the trainer has prepared them, and as they were written. One step is taken."""
        write_dataset(run, tmp_path / what, DatasetChoice(what=what))
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no"}
        args = getattr(trl, config)(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, **options)
        data = hf_datasets.load_dataset(str(tmp_path / what), split="train", cache_dir=str(tmp_path / "cache"))
        made = getattr(trl, trainer)(model, args=args, train_dataset=data, processing_class=tokenizer)
        made.train()
        lines = (tmp_path / what / "train.jsonl").read_text(encoding="utf-8").splitlines()
        return made.train_dataset, [json.loads(line) for line in lines]

    prepared, written = trained("sft", "SFTTrainer", "SFTConfig")
    assert len(prepared) == len(written) > 2
    for ready, row in zip(prepared, written, strict=True):
        pairs = zip(row["input_ids"], row["assistant_masks"], strict=True)
        assert ready["labels"] == [token if trained else -100 for token, trained in pairs]
    # a model of rewards gets our tokens, and the template gives DPO and KTO the same (and the newline behind the last turn)
    classifier = AutoModelForSequenceClassification.from_pretrained("demo/model", num_labels=1)
    prepared, written = trained("reward-model", "RewardTrainer", "RewardConfig", classifier)
    assert [ready["rejected_ids"] for ready in prepared] == [row["rejected_ids"] for row in written]
    for what, trainer, names in (
        ("dpo", "DPOTrainer", ("chosen_ids", "rejected_ids")),
        ("kto", "KTOTrainer", ("completion_ids",)),
    ):
        prepared, written = trained(what, trainer, trainer.replace("Trainer", "Config"))  # type: ignore[arg-type]
        by_prompt = {tuple(row["prompt_ids"] + row[names[0]]): row for row in written}
        assert len(prepared) == len(written) > 2
        for ready in prepared:  # KTO shuffles
            row = by_prompt[tuple(ready["prompt_ids"] + ready[names[0]][:-1])]
            assert [ready[name][:-1] for name in names] == [row[name] for name in names]
