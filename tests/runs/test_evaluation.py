"""Evaluation: of a recipe, of a run's checkpoints and of trained models."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import turnwise
from support.conversations import Says, a_row, a_table
from support.recipes import save_recipe
from support.servers import Answer, serving
from support.tiny import save_rows
from support.vision import picture, save_vision_model
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.environments.users import ScriptedUser
from turnwise.errors import RunError
from turnwise.record.evaluation import paired_test, prompt_tokens, read_results
from turnwise.record.reader import RecordedTrajectories, read
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.runs.evaluation import evaluated_models
from turnwise.train import evaluate
from turnwise.training.checkpoint import Checkpoints
from turnwise.types import Trajectory

# `turnwise eval` with the scripted engine, the embedded engine and a real HTTP server that speaks the OpenAI
# protocol.


PLACE = """
from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply


@environment
async def told(row):
    '''The first answer is right if it is the answer of the row; a second try is worth a half.'''
    turn = yield Opening(messages=row.messages)
    if turn.message["content"] == row["answer"]:
        yield Reply(reward=1.0, done=True)
        return
    turn = yield user_message("No. Again?")
    yield Reply(reward=0.5 * (turn.message["content"] == row["answer"]), done=True)
"""
"""Rows are `0+1?` with the answer 1, `1+1?` with the answer 2, ..."""


def recipe(folder: Path, model: Path, count: int = 3, **options: Any) -> Path:
    (folder / "place.py").write_text(PLACE, encoding="utf-8")
    rows = save_rows(folder / "rows.jsonl", count)
    return save_recipe(
        folder,
        model,
        environment=f"{folder}/place.py:told",
        data={"train": str(rows), "eval": str(rows)},
        **{"limits": {"turns": 4, "tokens_per_turn": 8}, "eval": {"samples_per_row": 2}, **options},
    )


def scripted(folder: Path, model: Path, *scripts: list[str], **options: Any) -> Path:
    """A recipe whose conversations answer with these texts, in the order of rows and samples."""
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps(script) + "\n" for script in scripts), encoding="utf-8")
    return recipe(folder, model, engine={"name": "scripted", "script": str(lines)}, **options)


SCRIPTS = (["1"], ["9", "1"], ["2"], ["2"], ["9", "9"], ["9", "3"])
"""Two conversations for each of three rows: rewards 1 and 0.5, 1 and 1, 0 and 0.5."""


def run(path: Path, out: Path, *words: str) -> int:
    return main(["eval", str(path), "--out", str(out), *words])


def test_the_numbers_are_those_of_the_conversations(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scripted(tmp_path, model, *SCRIPTS), tmp_path / "out") == 0
    result = read_results(tmp_path / "out" / "eval.json")
    (only,) = result.models
    assert (result.rows, result.samples_per_row, only.conversations, only.failed) == (3, 2, 6, 0)
    assert only.row_rewards == {"1": 0.75, "2": 1.0, "3": 0.25}
    assert only.reward.mean == pytest.approx(2 / 3)
    assert only.reward.low == pytest.approx(2 / 3 - 4.302652729911275 * 0.3818813079129867 / 3**0.5)  # t(0.975, 2)
    assert only.pass_rate.mean == pytest.approx((0.5 + 1 + 0) / 3)
    assert {k: value.mean for k, value in only.pass_at.items()} == pytest.approx({1: 0.5, 2: 2 / 3})
    assert {k: value.mean for k, value in only.pass_all.items()} == pytest.approx({1: 0.5, 2: 1 / 3})
    assert {turns: part.conversations for turns, part in only.turns.items()} == {1: 3, 2: 3}
    assert only.turns[2].reward.mean == pytest.approx((0.5 + 0.25) / 2)
    assert (only.turns_mean, only.stops) == (1.5, {"done": 6})
    assert only.cost.sampled_tokens == 9 * 2  # a byte and the stop token in each of the nine turns
    trajectories = list(read(tmp_path / "out"))  # an evaluation of a single model is read like a run
    assert [trajectory.id for trajectory in trajectories] == ["1/0", "1/1", "2/0", "2/1", "3/0", "3/1"]
    assert only.cost.prompt_tokens == sum(prompt_tokens(trajectory) for trajectory in trajectories)
    first, second = (turn for turn in trajectories[1].turns)
    (segment,) = trajectories[1].segments
    assert prompt_tokens(trajectories[1]) == segment.turn.index(first.index) + segment.turn.index(second.index)
    printed = capsys.readouterr().out
    assert "0.667 [-0.282, 1.615]*  0.500" in printed  # fewer than 30 rows are marked
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "0.667 [-0.282, 1.615]*  0.500" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "out"), "--id", "3/1"]) == 0
    assert "No. Again?" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["eval", "rollout"])
@pytest.mark.parametrize(("cut", "many"), [(6, "all 6"), (3, "3 of 6"), (2, None)])
def test_answers_that_are_cut_by_a_limit_are_told(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str, cut: int, many: str | None
) -> None:
    scripts = [["12345678901"]] * cut + [["7"]] * (6 - cut)
    path = scripted(
        tmp_path, model, *scripts, limits={"turns": 1, "tokens_per_turn": 8}, rollout={"samples_per_row": 2}
    )
    assert main([command, str(path), "--out", str(tmp_path / "out")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    told = f"{many} conversations ended in the middle of an answer (stop/length {cut / 6:.2g}), cut by limits.tokens_per_turn=8"
    assert (told in printed, "in the middle of an answer" in printed) == (many is not None, many is not None)


def test_the_bound_of_a_pass_is_that_of_the_recipe(tmp_path: Path, model: Path) -> None:
    path = scripted(tmp_path, model, *SCRIPTS, eval={"samples_per_row": 2, "pass_reward": 0.5})
    assert run(path, tmp_path / "out") == 0
    assert read_results(tmp_path / "out" / "eval.json").models[0].pass_rate.mean == pytest.approx(2.5 / 3)


def test_several_turns_are_compared_with_one_turn_on_the_same_rows(tmp_path: Path, model: Path) -> None:
    assert run(scripted(tmp_path, model, *SCRIPTS), tmp_path / "out", "--single-turn") == 0
    result = read_results(tmp_path / "out" / "eval.json")
    several, single = result.models
    assert (several.name, single.name, single.single_turn) == (model.name, f"{model.name}-single-turn", True)
    assert single.row_rewards == {"1": 0.5, "2": 1.0, "3": 0.0}
    (comparison,) = result.comparisons
    assert (comparison.first, comparison.second) == (several.name, single.name)
    assert comparison.test.difference.mean == pytest.approx((0.25 + 0 + 0.25) / 3)
    assert (comparison.test.better, comparison.test.equal, comparison.test.worse) == (2, 1, 0)
    assert comparison.test.p_sign_flip == 0.5
    assert run(scripted(tmp_path, model, *SCRIPTS), tmp_path / "b", "--single-turn", "limits.turns=1") == 1


def test_sources_are_told_apart(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "x", "answer": "7", "id": "seven"}) + "\n", encoding="utf-8")
    path = scripted(tmp_path, model, *SCRIPTS, ["7"], ["9", "9"])
    sources = json.dumps([str(tmp_path / "rows.jsonl"), str(other)])
    assert run(path, tmp_path / "out", f"data.eval={sources}") == 0
    (only,) = read_results(tmp_path / "out" / "eval.json").models
    assert {source: part.conversations for source, part in only.sources.items()} == {
        str(tmp_path / "rows.jsonl"): 6,
        str(other): 2,
    }
    assert only.sources[str(other)].reward.mean == 0.5


def right(question: dict[str, Any]) -> str:
    """The right answer, read from the first message."""
    return str(int(question["messages"][0]["content"].partition("+")[0]) + 1)


def said(text: str) -> Answer:
    usage = {"prompt_tokens": 10, "completion_tokens": 1}
    return Answer({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage})


def test_endpoints_and_engines_are_compared_on_the_same_rows_and_seeds(tmp_path: Path, model: Path) -> None:
    with serving(lambda question, number: said(right(question))) as server:
        words = ["--model", f"clever=some/model@{server.url}/v1", "--model", str(model), "--model", str(model)]
        assert run(recipe(tmp_path, model), tmp_path / "out", *words, "eval.sampling.temperature=0") == 0
    result = read_results(tmp_path / "out" / "eval.json")
    clever, first, second = result.models
    assert [m.name for m in result.models] == ["clever", model.name, f"{model.name}-2"]
    assert (clever.engine, clever.reward.mean, clever.pass_rate.mean) == ("openai", 1.0, 1.0)
    assert (clever.cost.prompt_tokens, clever.cost.sampled_tokens) == (60, 6)
    assert len({asked["seed"] for asked in server.asked}) == 6
    assert {asked["temperature"] for asked in server.asked} == {0.0}
    assert first.row_rewards == second.row_rewards  # the same weights and the same seeds
    pairs = [(comparison.first, comparison.second) for comparison in result.comparisons]
    assert pairs == [(model.name, "clever"), (f"{model.name}-2", "clever"), (f"{model.name}-2", model.name)]
    assert result.comparisons[2].test == paired_test([*second.row_rewards.values()], [*first.row_rewards.values()])
    with pytest.raises(RunError, match="is an evaluation of 3 models: read one of"):
        list(read(tmp_path / "out"))
    assert len(RecordedTrajectories(tmp_path / "out" / "clever")) == 6


@pytest.mark.parametrize(("count", "pairs"), [(2, "ba"), (3, "ba ca cb"), (4, "ba ca da cb db dc"), (5, "ba ca da ea")])
def test_all_pairs_of_few_models_are_compared_and_of_many_those_with_the_first(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], count: int, pairs: str
) -> None:
    models = [word for name in "abcde"[:count] for word in ("--model", f"{name}={model}")]
    assert run(scripted(tmp_path, model, *SCRIPTS), tmp_path / "out", *models, "--single-turn") == 0
    comparisons = read_results(tmp_path / "out" / "eval.json").comparisons
    single_turn = [(name, f"{name}-single-turn") for name in "abcde"[:count]]
    assert [(c.first, c.second) for c in comparisons] == [*map(tuple, pairs.split()), *single_turn]
    assert comparisons[0].test.difference.mean == 0
    many = "each model is compared with a only, because there are more than 4 models"
    assert (many in capsys.readouterr().out) is (count > 4)
    assert main(["show", str(tmp_path / "out")]) == 0
    assert (many in capsys.readouterr().out) is (count > 4)


def test_a_killed_evaluation_keeps_its_finished_conversations(tmp_path: Path, model: Path) -> None:
    path, out = recipe(tmp_path, model, count=6), tmp_path / "out"
    broken = threading.Event()
    broken.set()

    def answer(question: dict[str, Any], number: int) -> Answer:
        if number >= 5 and broken.is_set():
            return Answer({"error": "no"}, 401)
        return said(right(question))

    with serving(answer) as server:
        words = ["--model", f"m=x@{server.url}/v1", "max_concurrent=1"]
        assert run(path, out, *words) == 0  # 5 of 12 succeed
        file = out / "m" / "trajectories.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if b'"error":null' in line]
        assert len(kept) == 5
        file.write_bytes(b"".join(lines) + lines[0][:100])  # killed while it wrote a line
        broken.clear()
        asked = len(server.asked)
        assert run(path, out, *words) == 1  # neither resume=auto nor replace=true
        assert run(path, out, *words, "seed=5", "resume=auto") == 1
        assert len(server.asked) == asked
        assert run(path, out, *words, "resume=auto") == 0
        assert len(server.asked) == asked + 7
    lines = file.read_bytes().splitlines(keepends=True)
    assert (len(lines), set(kept) <= set(lines)) == (12, True)
    result = read_results(out / "eval.json")
    assert (result.models[0].conversations, result.models[0].failed, result.models[0].reward.mean) == (12, 0, 1.0)
    assert [t.id for t in read(out)] == [f"{row}/{n}" for row in range(1, 7) for n in range(2)]


def test_a_compressed_evaluation_is_read_and_resumed(tmp_path: Path, model: Path) -> None:
    path, out = scripted(tmp_path, model, *SCRIPTS), tmp_path / "out"
    assert run(path, out, "record.compression=gzip") == 0
    (folder,) = (file.parent for file in out.glob("*/evaluation.json"))
    compressed, plain = folder / "trajectories.jsonl.gz", folder / "trajectories.jsonl"
    assert not plain.exists()
    lines = gzip.decompress(compressed.read_bytes()).splitlines(keepends=True)
    assert [json.loads(line)["id"] for line in lines] == [f"{row}/{n}" for row in range(1, 4) for n in range(2)]
    assert [t.id for t in read(out)] == [f"{row}/{n}" for row in range(1, 4) for n in range(2)]
    # killed while it wrote the part of the third conversation
    parts = [gzip.compress(line) for line in lines]
    compressed.write_bytes(b"".join(parts[:2]) + parts[2][:20])
    (out / "eval.json").unlink()
    assert run(path, out, "record.compression=gzip", "resume=auto") == 0
    assert gzip.decompress(compressed.read_bytes()).splitlines(keepends=True)[:2] == lines[:2]
    assert read_results(out / "eval.json").models[0].row_rewards == {"1": 0.75, "2": 1.0, "3": 0.25}
    # the compression may change: the files of the other kind are replaced
    compressed.write_bytes(b"".join(parts[:4]))
    assert run(path, out, "resume=auto") == 0
    assert (compressed.exists(), plain.read_bytes().splitlines(keepends=True)[:4]) == (False, lines[:4])


def test_what_changed_is_named_when_an_evaluation_cannot_be_resumed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = scripted(tmp_path, model, *SCRIPTS), tmp_path / "out"
    assert run(path, out) == 0
    assert run(path, out, "resume=auto", "eval.pass_reward=0.5", "train.lr=1") == 0  # neither changes a conversation
    capsys.readouterr()
    assert run(path, out, "resume=auto", "limits.turns=3", "sampling.temperature=0.5") == 1
    error = capsys.readouterr().err
    assert "limits.turns=3 (was 4)" in error
    assert "sampling.temperature=0.5 (was 1.0)" in error
    assert run(path, out, "replace=true") == 0
    assert "the previous evaluation was moved to" in capsys.readouterr().out


def test_an_unfinished_evaluation_is_shown_as_such(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(scripted(tmp_path, model, *SCRIPTS), tmp_path / "out") == 0
    (tmp_path / "out" / "eval.json").unlink()
    capsys.readouterr()
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "this evaluation is not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.eval=null"], "turnwise eval needs held-out rows: set data.eval"),
        (["--model", "missing.yaml"], "missing.yaml"),
        (["--model", "no/such/model"], "no/such/model"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(recipe(tmp_path, model), tmp_path / "out", *words) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_with_other_files_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe(tmp_path, model), tmp_path) == 1
    assert "contains other files than those of an evaluation" in capsys.readouterr().err


def test_a_model_is_a_path_a_run_an_endpoint_or_a_file_of_options(tmp_path: Path, model: Path) -> None:
    config, _ = load(recipe(tmp_path, model, engine={"name": "local", "slots": 4}))
    options = tmp_path / "gpt.yaml"
    options.write_text(
        "engine: {name: openai, url: http://h/v1, model: gpt}\nsampling: {top_p: 0.9}\n", encoding="utf-8"
    )
    values = ["org/some-model", "a=x/y@https://h:1/v1", str(options), str(model)]
    models = evaluated_models(config, values, single_turn=False)
    assert [(m.name, m.model, m.config.engine.name) for m in models] == [
        ("some-model", "org/some-model", "local"),
        ("a", "x/y@https://h:1/v1", "openai"),
        ("gpt", "gpt@http://h/v1", "openai"),
        (model.name, str(model), "local"),
    ]
    assert models[2].config.sampling.top_p == 0.9
    assert models[0].config.engine == config.engine
    run_directory = tmp_path / "run"
    (run_directory / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="this run has no checkpoint"):
        evaluated_models(config, [str(run_directory)], single_turn=False)
    assert Checkpoints(run_directory).find() is None


# Conversations on held-out rows.


def test_an_evaluation_holds_scores_and_summarises() -> None:
    engine = Says("a", "b")
    table = a_table(engine, lambda: ScriptedUser(["And?"]))
    scorer = Scorer(trajectory=[TrajectoryReward("id", lambda one: float(one.row.id))])
    rows = [a_row(id="1"), a_row(id="4")]
    summary, groups = asyncio.run(evaluate(rows, table, scorer, samples=2, seed=3, step=7))
    assert [[one.id for one in group.trajectories] for group in groups] == [["1/0", "1/1"], ["4/0", "4/1"]]
    assert [[one.reward for one in group.trajectories] for group in groups] == [[1.0, 1.0], [4.0, 4.0]]
    assert (summary["step"], summary["reward/mean"], summary["reward/std"], summary["turns/mean"]) == (7, 2.5, 1.5, 2.0)
    assert summary["seconds/rollout"] >= 0
    seeds = [(request.conversation, request.seed) for request in engine.requests]
    again = Says("a", "b")
    asyncio.run(evaluate(rows, a_table(again, lambda: ScriptedUser(["And?"])), Scorer(), samples=2, seed=3, step=8))
    assert sorted((request.conversation, request.seed) for request in again.requests) == sorted(seeds)  # at every step


def test_the_pass_rate_counts_rewards_from_the_recipes_bound() -> None:
    scorer = Scorer(trajectory=[TrajectoryReward("id", lambda one: float(one.row.id))])
    rows = [a_row(id=id) for id in ("0.5", "1", "3")]
    for bound, expected in ((1.0, 2 / 3), (0.5, 1.0), (3.5, 0.0)):
        summary, _ = asyncio.run(evaluate(rows, a_table(Says("a")), scorer, pass_reward=bound))
        assert summary["pass_rate"] == expected


# Evaluation and replay of real runs: a complete checkpoint, a LoRA adapter, rows with images.


PLACES = Path(__file__).resolve().parents[1] / "support"

ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(3)]

OPTIONS: dict[str, Any] = {
    "environment": f"{PLACES / 'places.py'}:low_bytes",
    "limits": {"tokens_per_turn": 6, "turns": 2},
    "credit": "grpo",
    "progress": False,
}


def save(folder: Path, rows: Sequence[dict[str, Any]] = ROWS) -> str:
    """Rows in a file, because a replay in another process reads them again."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(start: Path, folder: Path, **changes: Any) -> turnwise.RunResult:
    options: dict[str, Any] = {
        **OPTIONS, "model": start, "rows": save(folder), "output": folder / "run",
        "train": {"steps": 1, "batch_size": 3, "group_size": 4, "lr": 0.02}, **changes,
    }  # fmt: skip
    return turnwise.train(**options)


def worst_difference(model: Any, trajectories: Sequence[Trajectory]) -> float:
    """The largest difference between recorded log-probabilities and those of a model, at temperature 1."""
    worst = 0.0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            with torch.no_grad():
                logits = model(torch.tensor([list(segment.token_ids)])).logits[0].float()
            logprobs = logits.log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    expected = float(logprobs[place - 1, segment.token_ids[place]])
                    worst = max(worst, abs(expected - segment.logprobs[place]))
    return worst


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(["replay", *words]), capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize("lora", [False, True])
def test_the_newest_checkpoint_of_a_run_is_evaluated_and_replayed(
    model: Path, tmp_path: Path, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The conversations of the evaluation have the log-probabilities that transformers and peft give to their tokens."""
    if lora:
        peft = pytest.importorskip("peft")
        run = trained(model, tmp_path, model={"path": str(model), "lora": {"rank": 4}})
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        reference = peft.PeftModel.from_pretrained(base, run.model)
    else:
        run = trained(model, tmp_path)
        reference = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    evaluated = turnwise.evaluate(
        models={"before": model, "after": run}, eval_rows=save(tmp_path), model=model, output=tmp_path / "compared", **OPTIONS
    )  # fmt: skip
    after = list(evaluated.trajectories("after"))
    assert len(after) == 3
    assert worst_difference(reference.eval(), after) < 1e-3
    assert worst_difference(reference, list(evaluated.trajectories("before"))) > 1e-2  # the weights are others
    same = "conversations are the same, 0 differ\n"
    assert replayed(capsys, str(run.directory), "--all") == (0, f"12 of 12 {same}")
    assert replayed(capsys, str(evaluated.directory / "after"), "--all") == (0, f"3 of 3 {same}")


@pytest.mark.slow
def test_rows_with_images_are_evaluated_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_vision_model(tmp_path / "model")
    rows: list[dict[str, Any]] = []
    for n in range(3):
        picture(16, 8 * (n + 1), seed=n).save(tmp_path / f"{n}.png")
        rows.append({"prompt": f"<image>What is {n}?", "images": [f"{n}.png"]})
    options: dict[str, Any] = {**OPTIONS, "environment": f"{PLACES / 'vision.py'}:shows_another"}
    evaluated = turnwise.evaluate(
        models={"first": model, "second": save_vision_model(tmp_path / "other", seed=1)}, eval_rows=save(tmp_path, rows),
        model={"path": str(model), "device": "cpu"}, output=tmp_path / "compared", eval={"samples_per_row": 2}, **options,
    )  # fmt: skip
    for name in ("first", "second"):
        trajectories = list(evaluated.trajectories(name))
        of_model = evaluated.models[name]
        assert [of_model.failed, len(trajectories)] == [0, 6]
        assert of_model.reward.mean == pytest.approx(sum(t.reward or 0.0 for t in trajectories) / 6)
        # an image of 16 x 8(n+1) pixels has 2(n+1) tokens, which count in the prompt
        short = [next(place for place, turn in enumerate(t.segments[0].turn) if turn >= 0) for t in trajectories]
        assert [short[2] - short[0], short[4] - short[2]] == [2, 2]
    place = str(evaluated.directory / "first")
    assert replayed(capsys, place, "--all") == (0, "6 of 6 conversations are the same, 0 differ\n")
    picture(16, 16, seed=9).save(tmp_path / "0.png")  # another image, of another size
    status, text = replayed(capsys, place, "--all")
    assert status == 1
    assert "4 of 6 conversations are the same, 2 differ" in text
    assert "segments[0].token_ids" in text
