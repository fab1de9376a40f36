"""What a run records, thinned, compressed and resumed; `turnwise replay`: what is the same, and each kind of difference; and
`turnwise play`, where a person takes the turns of the model."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support import byte_tokenizer
from support.recipes import PLACES, save_recipe
from support.servers import Answer, serving
from support.tiny import save_model, save_rows
from support.training import train_silently
from turnwise import Row, api, record
from turnwise.chat.renderer import Renderer
from turnwise.cli import main
from turnwise.commands.show import Selection, show
from turnwise.config.recipe import load
from turnwise.data.conversations import read_conversations
from turnwise.data.rows import read_rows
from turnwise.errors import ConfigError, RunError
from turnwise.record.reader import RecordedTrajectories
from turnwise.record.writer import Retention
from turnwise.runs.play import completions, typed_arguments
from turnwise.runs.replay import replay
from turnwise.sft import replay as sft_replay
from turnwise.terminal.typed_lines import TypedLines
from turnwise.train import assemble
from turnwise.types import Failure, Trajectory
from turnwise.view.runs import ViewedRun, find_runs

# `turnwise replay`: what is the same, and each kind of difference.


PLACE = """
from turnwise.environments.environment import current_episode, environment, user_message
from turnwise.types import Opening, Reply, Resume

ANSWER, REWARD, TURNS = "No. Again?", 0.5, 2


@environment
async def told(row):
    turn = yield Opening(messages=row.messages)
    for number in range(TURNS - 1):
        turn = yield user_message(ANSWER, reward=0.25)
    yield Reply(reward=REWARD, done=True)


@environment
async def asks(row):
    async with current_episode().agent("helper", messages=row.messages) as helper:
        yield Opening(messages=row.messages)
        helped = [await helper.turn() for _ in range(2)]
        yield user_message(ANSWER, reward=sum(float(turn.text) for turn in helped))
        yield Reply(reward=REWARD, done=True)


@environment
async def cutting(row):
    yield Opening(messages=row.messages)
    yield Reply(resume=Resume(keep=1, add="!"))
    yield Reply(done=True)


def share(group):
    return [len(t.answer) / sum(len(other.answer) for other in group.trajectories) for t in group.trajectories]


def length(completion):
    return len(completion) * REWARD
"""


def collected(folder: Path, model: Path, *overrides: str, environment: str = "told", **options: Any) -> Path:
    """The directory of a rollout with scripted turns."""
    (folder / "place.py").write_text(PLACE, encoding="utf-8")
    (folder / "lines.jsonl").write_text('["a", "bc"]\n["def", "g"]\n["h", "ij"]\n["k", "l"]\n', encoding="utf-8")
    path = save_recipe(
        folder,
        model,
        environment=f"{folder}/place.py:{environment}",
        data={"train": str(save_rows(folder / "rows.jsonl", 2))},
        engine={"name": "scripted", "script": str(folder / "lines.jsonl")},
        rollout={"samples_per_row": 2},
        reward={"trajectory": [f"{folder}/place.py:length"]},
        **options,
    )
    assert main(["rollout", str(path), "--out", str(folder / "out"), *overrides]) == 0
    return folder / "out"


def replayed(out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["replay", str(out), *(words or ("--all",))])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def changed(folder: Path, old: str, new: str, *, environment: str = "told") -> list[str]:
    """Overrides that use a changed copy of the environment and of the reward function."""
    text = (folder / "place.py").read_text(encoding="utf-8")
    assert old in text
    (folder / "changed.py").write_text(text.replace(old, new), encoding="utf-8")
    place = f"{folder}/changed.py"
    return [f"environment.use={place}:{environment}", f"reward.trajectory=[{place}:length]"]


def test_an_unchanged_environment_gives_the_same(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    assert replayed(out, capsys) == (0, "4 of 4 conversations are the same, 0 differ\n")
    assert replayed(out, capsys, "--id", "2/1") == (0, "1 of 1 conversations are the same, 0 differ\n")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            '"No. Again?"',
            '"No. Once more?"',
            [
                "messages[2].content: 'No. Again?' recorded, 'No. Once more?' now",
                "segments[0].token_ids[",
            ],
        ),
        (
            "reward=0.25",
            "reward=0.75",
            ["turns[0].reward: 0.25 recorded, 0.75 now", "rewards.turns: 0.75 recorded, 1.25 now"],
        ),
        ("* REWARD", "* 2", ["rewards.length: ", "reward: "]),
        ("0.5, 2", "0.5, 1", ["turns: 2 recorded, 1 now", "messages: 4 recorded, 2 now"]),
        ("0.5, 2", "0.5, 3", ["stop: 'done' recorded, 'error' now", "asks for turn 2, and the record has 2 turns"]),
        (
            "REWARD, done=True",
            "1 / 0, done=True",
            ["error: null recorded", "ZeroDivisionError"],
        ),
    ],
)
def test_what_differs_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, expected: list[str]
) -> None:
    out = collected(tmp_path, model)
    status, printed = replayed(out, capsys, "--id", "1/0", *changed(tmp_path, old, new))
    assert status == 1
    assert "1/0 differs:" in printed
    assert [text for text in expected if text not in printed] == []
    assert "0 of 1 conversations are the same, 1 differ" in printed


def test_the_mean_rewards_of_conversations_that_differ_are_compared(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    before = [float(one.reward or 0.0) for one in RecordedTrajectories(out)]
    status, printed = replayed(out, capsys, "--all", *changed(tmp_path, "reward=0.25", "reward=0.75"))
    assert status == 1
    mean = sum(before) / len(before)
    assert f"mean reward: {mean:.3f} recorded, {mean + 0.5:.3f} now\n" in printed


def test_of_many_conversations_that_differ_the_summary_is_first_and_the_worst_follow(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    words = changed(tmp_path, "* REWARD", "* (1 + 0.1 * len(completion))")  # more for longer answers
    status, printed = replayed(out, capsys, "--all", *words)
    assert status == 1
    lines = printed.splitlines()
    assert lines[0] == "0 of 4 conversations are the same, 4 differ"
    assert lines[2] == "differences in: reward (4), rewards.length (4)"
    assert lines[3] == "the 3 that differ most (--full: all 4; --id ID: all of one):"
    by_change = sorted(RecordedTrajectories(out), key=lambda one: -one.rewards["length"])  # the more, the longer
    assert [line for line in lines if line.endswith(" differs:")] == [f"{one.id} differs:" for one in by_change[:3]]
    everything = replayed(out, capsys, "--all", "--full", *words)[1]
    assert everything.count(" differs:") == 4


def test_a_changed_limit_changes_the_stop_reason(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = replayed(collected(tmp_path, model), capsys, "--id", "1/0", "limits.turns=1")
    assert status == 1
    assert "stop: 'done' recorded, 'max_turns' now" in printed


def test_a_changed_tokenizer_changes_the_tokens(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for file in model.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    out = collected(tmp_path, own)
    template = own / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    assert "<|im_start|>" in text
    template.write_text(text.replace("<|im_end|>\n", "<|im_end|>\n\n"), encoding="utf-8")
    assert template.read_text(encoding="utf-8") != text
    status, printed = replayed(out, capsys, "--id", "1/0")
    assert status == 1
    assert "segments[0].token_ids" in printed
    assert "messages" not in printed


def test_a_cut_turn_is_encoded_from_its_text(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = collected(tmp_path, model, environment="cutting")
    status, printed = replayed(out, capsys, "--id", "1/1")
    assert (status, "1/1: turn 0: not all of its tokens are in the record" in printed) == (0, True)


def test_functions_of_a_group_get_the_group(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "place.py").write_text(PLACE, encoding="utf-8")
    out = collected(tmp_path, model, f"reward.group=[{tmp_path}/place.py:share]")
    assert replayed(out, capsys, "--id", "1/0")[0] == 0
    words = changed(tmp_path, "len(t.answer) /", "2 * len(t.answer) /")
    status, printed = replayed(out, capsys, "--id", "1/0", *words, f"reward.group=[{tmp_path}/changed.py:share]")
    assert status == 1
    assert "rewards.share: 0.6666666666666666 recorded, 1.3333333333333333 now" in printed


def test_conversations_with_an_endpoint_are_replayed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place.py").write_text(PLACE, encoding="utf-8")
    rows = save_rows(tmp_path / "rows.jsonl", 2)
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}

    def answer(question: dict[str, Any], number: int) -> Answer:
        seen = len(question["messages"])
        message = {"content": None, "tool_calls": [call]} if seen == 1 else {"content": "2"}
        if "tools" not in question:  # of the agent
            message = {"content": f"{seen}.5"}
        return Answer({"choices": [{"message": message, "finish_reason": "stop"}]})

    with serving(answer) as server:
        path = save_recipe(
            tmp_path,
            Path("some/model"),
            engine={"name": "openai", "url": server.url},
            tools=["turnwise.environments.calculator:calculator"],
            environment=f"{tmp_path}/place.py:asks",
            data={"train": str(rows), "eval": str(rows)},
        )
        assert main(["eval", str(path), "--out", str(tmp_path / "eval")]) == 0
    status, printed = replayed(tmp_path / "eval", capsys)
    assert (status, "4 conversations" in printed) == (0, True), printed
    words = changed(tmp_path, '"No. Again?"', '"Sure?"', environment="asks")[:1]
    status, printed = replayed(tmp_path / "eval" / "model", capsys, "--all", *words)
    assert status == 1
    assert "messages[4].content: 'No. Again?' recorded, 'Sure?' now" in printed


def test_advantages_of_another_estimator_are_compared_with_the_recorded_ones(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01}
    recipe = save_recipe(tmp_path, model, train=train, limits={"turns": 2, "tokens_per_turn": 6})
    assert main(["train", str(recipe)]) == 0
    status, printed = replayed(tmp_path / "run", capsys, "--all", "credit=grpo")
    assert (status, "8 of 8 conversations are the same" in printed) == (0, True)
    assert re.search(r"advantages of \d+ turns: mean size (\S+) recorded, \1 now; 0 with the other sign", printed)
    status, printed = replayed(tmp_path / "run", capsys, "--all", "--full", "credit=rloo")
    assert status == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text("utf-8").splitlines()]
    for line, read in zip(lines, record.read(tmp_path / "run"), strict=True):
        assert read.trained_tokens == sum(turn >= 0 for part in line["segments"] for turn in part["turn"]) > 0
        (other,) = (one for one in lines if one["group"] == line["group"] and one["id"] != line["id"])
        found = re.search(
            rf"{re.escape(line['id'])} differs:\n  turns\[0\].advantage: (\S+) recorded, (\S+) now", printed
        )
        before, now = (float(value) for value in found.groups()) if found else (line["turns"][0]["advantage"],) * 2
        assert before == line["turns"][0]["advantage"]
        assert now == pytest.approx(line["reward"] - other["reward"], abs=1e-6)  # against the rest of the group


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --id ID or --all"),
        (("--id", "x", "--all"), "give either --id ID or --all"),
        (("--id", "x", "--full"), "--full belongs to --all"),
        (("--id", "x"), "has the id 'x'"),
        (("--all", "data.train=other.jsonl"), "there is no file"),
        (("--all", "--eval"), "there is no file"),
        (
            ("--all", "train.lr=1"),
            "train.lr=1 has no effect on a replay, which runs environment, tools and rewards again",
        ),
        (("--all", "credit=gae"), "credit.name=gae: a replay does not have the values of a critic"),
        (("--all", "credit=remax"), "credit.name=remax: a replay does not have greedy conversations"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    out = collected(tmp_path, model)
    capsys.readouterr()
    assert main(["replay", str(out), *words]) == 1
    assert message in capsys.readouterr().err


def test_rows_that_are_gone_are_named(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = collected(tmp_path, model)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x", "answer": "y", "id": "z"}) + "\n", encoding="utf-8")
    status, printed = replayed(out, capsys)
    assert status == 1
    assert "row '2' of the record is not among the 1 rows of the data" in printed


@pytest.mark.parametrize("number", [1, 3], ids=["in the middle", "at the end"])
def test_a_damaged_line_is_left_out_and_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number][:100] + b"\n"
    path.write_bytes(b"".join(lines))
    status, text = replayed(out, capsys)
    assert status == 1
    assert f"{path}:{number + 1}" in "".join(text.split("\n"))
    assert "3 of 3 conversations are the same, 0 differ" in text


def test_a_last_line_that_a_killed_run_has_not_finished_is_no_damage(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    assert replayed(out, capsys) == (0, "3 of 3 conversations are the same, 0 differ\n")


def test_a_damaged_part_of_a_compressed_record_is_left_out_and_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = collected(tmp_path, model)
    path = out / "trajectories.jsonl"
    first, second, third, last = [gzip.compress(line, 3, mtime=0) for line in path.read_bytes().splitlines(True)]
    path.unlink()
    (out / "trajectories.jsonl.gz").write_bytes(first + second[:30] + b"??" + second[32:] + third + last)
    status, text = replayed(out, capsys)
    assert status == 1
    assert f"the part at byte {len(first)} is not gzip data" in " ".join(text.split())
    assert "3 of 3 conversations are the same, 0 differ" in text


# What a run records: thinned, compressed, resumed, and read by everything that reads runs.


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 4},
        train={"steps": 5, "batch_size": 2, "group_size": 4, "lr": 0.01},
        data={
            "train": str(save_rows(tmp_path / "train.jsonl")),
            "eval": str(save_rows(tmp_path / "eval.jsonl", 2)),
        },
    )


def run(recipe: Path, *overrides: str) -> Path:
    """The directory of a finished run."""
    config, _ = load(recipe, overrides)
    train_silently(assemble(config))
    return Path(config.output)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


THINNED = ("record.every=2", "record.best_and_worst=1", "record.compression=gzip")


@pytest.mark.slow
def test_a_run_records_what_the_recipe_says(recipe: Path) -> None:
    complete = run(recipe, "deterministic=true")
    thinned = run(recipe, "deterministic=true", *THINNED, "record.trainer_logprobs=false", f"output={complete}-thinned")
    everything = list(record.read(complete))
    assert len(everything) == 5 * 2 * 4
    assert any(segment.trainer_logprobs for one in everything for segment in one.segments)
    assert not (thinned / "trajectories.jsonl").exists()
    kept = record.RecordedTrajectories(thinned)
    assert {one.step for one in kept} == {1, 2, 4, 5}  # the first, each second, the last
    assert not any(segment.trainer_logprobs for one in kept for segment in one.segments)
    for one in {one.group for one in kept}:
        group = [other for other in everything if other.group == one]
        rewards = sorted(other.reward for other in group if other.reward is not None)
        assert sorted(other.reward for other in kept if other.group == one) == [rewards[0], rewards[-1]]  # type: ignore[type-var]
    # metrics are of all conversations
    names = ("reward/mean", "tokens/sampled", "tokens/trained", "groups/zero_std")
    of_all, of_thinned = metrics(complete), metrics(thinned)
    assert [[line[name] for name in names] for line in of_thinned] == [
        [line[name] for name in names] for line in of_all
    ]
    assert [line["record/dropped"] for line in of_thinned] == [4, 4, 8, 4, 4]
    assert "record/dropped" not in of_all[0]
    assert len(list(record.read(thinned / "eval_trajectories.jsonl"))) == 4  # evaluations are complete


@pytest.mark.slow
def test_a_resumed_run_records_what_an_uninterrupted_run_records(recipe: Path) -> None:
    straight = run(recipe, "deterministic=true", *THINNED)
    resumed = f"output={straight}-resumed"
    run(recipe, "deterministic=true", *THINNED, resumed, "train.steps=3", "checkpoint.every=3")
    directory = run(recipe, "deterministic=true", *THINNED, resumed, "resume=auto")
    expected = [one.id for one in record.read(straight)]
    # step 3 was the last step of the first part
    assert [one.id for one in record.read(directory) if one.step != 3] == expected
    with pytest.raises(RunError, match=r"record\.compression cannot change"):
        run(recipe, "deterministic=true", resumed, "resume=auto", "train.steps=6", "record.compression=none")


@pytest.mark.slow
def test_everything_that_reads_runs_reads_compressed_and_thinned_runs(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(recipe, *THINNED)
    file = directory / "trajectories.jsonl.gz"
    with gzip.open(file) as lines:
        ids = [json.loads(line)["id"] for line in lines]
    assert [one.id for one in record.read(directory)] == ids
    assert (directory / "trajectories.jsonl.gz.index").is_file()  # written when the run ended
    (one,) = record.RecordedTrajectories(directory).with_id(ids[2])
    assert one.id == ids[2]
    # show
    with (tmp_path / "shown").open("w") as shown:
        console = Console(file=shown, width=200)
        show(console, directory)
        show(console, directory, Selection(id=ids[2]))
        show(console, directory, Selection(step=4, worst=1))
        show(console, directory, Selection(last=1), evaluation=True)
    text = (tmp_path / "shown").read_text()
    assert "16 conversations; " in text
    assert "24 conversations are not recorded (record.every, record.best_and_worst)" in text
    assert ids[2] in text
    # view
    assert find_runs([directory]) == [directory]
    viewed = ViewedRun(directory)
    for index in viewed.indexes.values():
        index.update()
    assert viewed.indexes["train"].columns()["id"] == ids
    assert viewed.conversation("train", 2)["id"] == ids[2]
    assert viewed.summary()["conversations"] == {"train": 16, "eval": 4}
    viewed.close()
    # replay
    (replayed,) = asyncio.run(replay(directory, id=ids[2]))
    assert (replayed.id, list(replayed.differences)) == (ids[2], [])
    # as data of fine-tuning, and from Python
    assert len(read_rows(str(file), columns={"prompt": "messages"})) == 16
    assert [one.id for one in api.RunResult(directory).trajectories] == ids
    assert main(["show", str(directory), "--id", "nobody"]) == 1
    assert "no conversation in" in capsys.readouterr().err


def test_rewards_that_compare_a_group_are_not_replayed_on_a_part_of_it(recipe: Path) -> None:
    directory = run(recipe, *THINNED, f"reward.group=['{PLACES}:ranked']")
    with pytest.raises(RunError, match=r"record.best_and_worst=1.*compares the conversations of a group"):
        asyncio.run(replay(directory))


def test_what_keeps_everything_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"record.best_and_worst=2 has no effect.* and a group has 4"):
        run(recipe, "record.best_and_worst=2")


def conversation(id: str, group: str, reward: float | None) -> Trajectory:
    one = Trajectory(id=id, group=group, row=Row(id=group, messages=[]), reward=reward)
    if reward is None:
        one.fail(Failure("environment", "no luck"))
    return one


def test_which_conversations_of_a_group_are_kept() -> None:
    rewards = [0.5, None, 1.0, 0.5, None, 0.0, 1.0]
    group = [conversation(f"a/{n}", "a", reward) for n, reward in enumerate(rewards)]
    other = [conversation("b/0", "b", None)]
    kept = Retention(every=3, best_and_worst=1).kept([*group, *other], step=1, steps=9)
    assert [one.id for one in kept] == ["a/1", "a/2", "a/5", "b/0"]
    kept = Retention(best_and_worst=2).kept(group, step=2, steps=9)
    assert [one.id for one in kept] == ["a/1", "a/2", "a/3", "a/4", "a/5", "a/6"]
    steps = [step for step in range(1, 12) if Retention(every=5).kept(group, step=step, steps=11)]
    assert steps == [1, 5, 10, 11]


# A person takes the turns of the model: what is seen, what is typed, what is taken back, what is saved.


ENVIRONMENT = """
from turnwise import Opening, Reply, environment, user_message

visits = []

@environment
async def guessing(row, forgetful=False):
    visits.append(row.id)
    try:
        turn = yield Opening(messages=row.messages)
        for number in range(3):
            if str(row["answer"]) in turn.text:
                yield Reply(reward=1.0, done=True, info={"tries": number + 1})
            place = f" (visit {len(visits)})" if forgetful else ""
            turn = yield user_message(f"no\\x1b]0;owned\\x07{place}", reward=-0.25)
    finally:
        visits.append("closed")
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def place(tmp_path: Path, tokenizer: Path) -> Path:
    rows = [{"prompt": f"What is {n}*7?", "answer": n * 7} for n in (6, 7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "user.py").write_text(ENVIRONMENT)
    recipe = {
        "model": {"path": str(tokenizer)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "environment": f"{tmp_path / 'user.py'}:guessing",
        "tools": ["turnwise.environments.calculator:calculator"],
        "limits": {"tokens_per_turn": 400, "context": 4096},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def play(place: Path, monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    """Play with these lines as standard input."""
    (place / "typed.txt").write_text(typed)
    with (place / "typed.txt").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        return main(["play", str(place / "recipe.yaml"), *words])


def test_a_person_sees_what_the_model_would_see_and_rewards_with_their_parts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = '/call calculator expression="7*7"\nlet me guess 5\n"""\nIt is\n49\n"""\n'
    assert play(place, monkeypatch, typed, "--row", "2") == 0
    shown = capsys.readouterr().out
    assert "row 2 of data.train; /help lists the commands" in shown
    assert "  | What is 7*7?<|im_end|>" in shown
    assert 'parsed call call_0: calculator({"expression": "7*7"})' in shown
    assert "<tool_response>\n  | 49\n  | </tool_response><|im_end|>" in shown
    assert "reward -0.25" in shown
    assert "  | no\\x1b]0;owned\\x07<|im_end|>" in shown
    assert "\x1b" not in shown  # what an environment says does not reach the terminal
    assert "  | It is\n  | 49\n" in shown
    assert "reward: 0.75" in shown
    assert "end: stop reason done, 3 turns" in shown


def test_undo_gives_the_turns_before_it_again_and_says_if_the_environment_differs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(place, monkeypatch, "1\n2\n/undo\n42\n/undo\n/undo\n42\n/quit\n") == 0
    shown = capsys.readouterr().out
    assert shown.count("end: stop reason done, 2 turns") == 1
    assert "reward: 0.75" in shown  # the turn that was taken back has no reward
    assert shown.count("end: stop reason done, 1 turn") == 1
    assert "differently" not in shown
    changed = ["environment={use: " + str(place / "user.py") + ":guessing, arguments: {forgetful: true}}"]
    assert play(place, monkeypatch, "1\n2\n/undo\n", *changed) == 0
    assert "this time, the environment has answered differently before turn 1" not in capsys.readouterr().out
    assert play(place, monkeypatch, "1\n2\n3\n/undo\n", *changed) == 0
    assert "this time, the environment has answered differently before turn 1" in capsys.readouterr().out


def test_a_saved_conversation_is_fine_tuned_on_and_a_saved_script_is_played_again(
    place: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row, script, out = place / "row.jsonl", place / "script.jsonl", place / "out"
    typed = f"/call calculator expression=6*7\nIt is 42\n/save {row}\n/script {script}\n"
    assert play(place, monkeypatch, typed) == 0
    assert "is not finished" not in capsys.readouterr().out
    words = [f"engine={{name: scripted, script: {script}}}", "--out", str(out)]
    assert main(["rollout", str(place / "recipe.yaml"), *words]) == 0
    (played,) = RecordedTrajectories(out / "trajectories.jsonl")[:]
    assert [turn.text for turn in played.turns] == json.loads(script.read_text())
    assert played.reward == 1.0
    rows: list[Row] = read_conversations(str(row))
    (tuned,) = asyncio.run(sft_replay.replay(rows, Renderer.from_pretrained(tokenizer)))
    assert tuned.segments[0].token_ids == played.segments[0].token_ids
    assert tuned.segments[0].turn == played.segments[0].turn


def test_a_conversation_that_is_saved_before_its_end_is_said_to_be_unfinished(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = place / "row.jsonl"
    assert play(place, monkeypatch, f"/call calculator expression=6*7\n/save {row}\n/quit\n") == 0
    shown = capsys.readouterr().out
    assert "row.jsonl: appended 1 turn as a row for `turnwise sft`" in shown
    assert "the conversation is not finished: this row ends after turn 0" in shown
    assert json.loads(row.read_text())["messages"][-1]["role"] == "assistant"


def test_the_model_takes_a_turn_when_it_is_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(place / "model")
    words = [f"model.path={place / 'model'}", "limits={tokens_per_turn: 8, context: 1000}", "--tokens"]
    assert play(place, monkeypatch, "/model\n/undo\n/model\n/quit\n", *words) == 0
    shown = capsys.readouterr().out
    assert shown.count("starting the engine local") == 1
    assert '"<|im_start|>"  (control token)' in shown
    sampled = [part.split("ended with")[0] for part in shown.split("turn 0:")[1:]]
    assert len(set(sampled)) == len(sampled)  # after /undo, another turn


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("/cal\n", "/cal is no command"),
        ("/call adder a=1\n", "there is no tool 'adder'"),
        ("/call calculator 6*7\n", "'6*7' is no argument: write name=value for each"),
        ("/call calculator {a}\n", "the arguments of the call"),
        ("/undo\n", "there is no turn to take back"),
        ("42\n/model\n", "end> /model the conversation has ended: /undo, /again"),
        ("/save\n", "name the file: /save FILE"),
        ("/save x.jsonl\n", "there is no turn yet"),
        ("7\n", "the input is over, and the conversation is in turn 1"),
        ("42\n/call calculator 1\n", "the conversation has ended: /undo, /again, /save, /script or /quit"),
    ],
)
def test_what_cannot_be_done_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    assert play(place, monkeypatch, typed) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown
    assert "/call is no command" not in shown


def test_a_broken_environment_is_shown_with_its_line_and_status_1(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "user.py").write_text(ENVIRONMENT.replace('str(row["answer"])', 'str(row["anser"])'))
    assert play(place, monkeypatch, "42\n") == 1
    shown = capsys.readouterr().out
    assert "error (environment): " in shown
    assert "anser" in shown
    assert 'if str(row["anser"]) in turn.text' in shown


def test_rows_and_engines_that_cannot_be_played_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(place, monkeypatch, "", "--row", "3") == 1
    assert "--row 3: no row of data.train has this id; the ids of its 2 rows are 1, 2" in capsys.readouterr().err
    assert play(place, monkeypatch, "", "engine={name: openai, url: 'http://localhost:1/v1'}") == 1
    assert "an endpoint renders the prompt itself" in capsys.readouterr().err


def test_words_are_completed() -> None:
    parameters = {"type": "object", "properties": {"city": {}, "country": {}, "days": {}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    assert completions("/ca", tools) == ["/call "]
    assert completions("/call we", tools) == ["weather "]
    assert completions("/call weather c", tools) == ["city=", "country="]
    assert completions("/call weather city=Rome ", tools) == ["country=", "days="]
    assert completions("hello c", tools) == []


def test_typed_arguments() -> None:
    assert typed_arguments("") == {}
    assert typed_arguments('a=2 b="two words" c=[1, 2] d=x=y') == {"a": 2, "b": "two words", "c": [1, 2], "d": "x=y"}
    assert typed_arguments('{"a": {"b": "1 2"}}') == {"a": {"b": "1 2"}}
    with pytest.raises(ConfigError, match="'two' is no argument"):
        typed_arguments("a=1 two")


def test_without_a_standard_input_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    with pytest.raises(ConfigError, match=r"no standard input to read from.*in a terminal"):
        TypedLines()
