"""Training runs with teachers: what options change, resuming, memory, and what is refused at the start."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from support import byte_tokenizer
from support.conversations import RENDERER
from support.image_recipe import save_image_recipe
from support.recipes import save_recipe
from support.servers import Answer, serving
from support.tiny import save_model, tiny_model
from support.training import train_run
from test_train import lines, timeless
from turnwise import assembly
from turnwise.assembly.teachers import _prompt, refuse_unknown_teachers
from turnwise.config.recipe import checked, load
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.doctor.memory import predict, read_model_config, workload_of
from turnwise.engines.remote.scoring import ScoringServer
from turnwise.errors import ConfigError, EngineError, Failed, RunError
from turnwise.options.section import Use
from turnwise.runs.training_run import assemble
from turnwise.types import Row, Trajectory, Turn


def solved(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    """The prompt with the row's answer."""
    first, *others = trajectory.messages[: turn.message_index]
    return [{**first, "content": f"{first['content']} (It is {trajectory.row['answer']}.)"}, *others]


def with_the_turn(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    """Messages that do not end where the turn begins."""
    assert turn.message_index is not None
    return trajectory.messages[: turn.message_index + 1]


HERE = Path(__file__)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the student `m` and the teachers `t` and `u`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("mtu"):
        save_model(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def recipe(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1), "teacher": "tu"[n % 2]} for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return save_recipe(
        folder,
        models / "m",
        data={"train": str(folder / "rows.jsonl")},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 100},
        deterministic=True,
    )


def learnt(recipe: Path, out: Path, *options: str) -> str:
    _, metrics, run = train_run(recipe, out, *options)
    assert all(0 <= line["teacher/agreement"] <= 1 for line in metrics)
    assert abs(metrics[0]["teacher/divergence_turn"]) >= abs(metrics[0]["teacher/divergence"])
    return run.learner.fingerprint()


@pytest.mark.slow
def test_options_of_the_teacher_change_what_is_learnt(recipe: Path, models: Path, tmp_path: Path) -> None:
    one = f"teacher.path={models / 't'}"
    exact = "teacher.signal=divergence"
    several = f"teacher.models=[{{name: t, path: {models / 't'}}}, {{name: u, path: {models / 'u'}}}]"
    heavier = f"teacher.models=[{{name: t, path: {models / 't'}, weight: 3}}, {{name: u, path: {models / 'u'}}}]"
    swapped = f"teacher.models=[{{name: u, path: {models / 't'}}}, {{name: t, path: {models / 'u'}}}]"
    student = f"teacher.context={HERE}:solved"
    runs = {
        "sampled": [one],
        "alone": [one, "credit=none"],
        "path": [f"teacher.path={models / 'u'}"],
        "dtype": [one, "teacher.dtype=bfloat16"],
        "coef": [one, "teacher.coef=0.5"],
        "gamma": [one, "teacher.gamma=0.5"],
        "clip": [one, "teacher.clip=0.01"],
        "divergence": [one, exact],
        "forward": [one, exact, "teacher.divergence=forward_kl"],
        "jsd": [one, exact, "teacher.divergence=jsd"],
        "beta": [one, exact, "teacher.divergence=jsd", "teacher.beta=0.2"],
        "top_k": [one, exact, "teacher.top_k=3"],
        "context": [one, f"teacher.context={HERE}:solved"],
        "student": [student],
        "student, divergence": [student, exact, "teacher.top_k=3"],
        "several": [several],
        "several, divergence": [several, exact],
        "weight": [heavier],
        "column": [several, "teacher.column=teacher"],
        "name": [swapped, "teacher.column=teacher"],
    }
    found = {name: learnt(recipe, tmp_path / str(n), *options) for n, (name, options) in enumerate(runs.items())}
    for (name, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first != second, (name, other)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["teacher.signal=divergence"], ["model.lora=4"]], ids=["divergence", "lora"])
def test_a_run_with_a_teacher_goes_on_bit_by_bit_and_knows_its_teacher(
    options: list[str], recipe: Path, models: Path, tmp_path: Path
) -> None:
    given = [*options, f"teacher.path={models / 't'}", "checkpoint.every=1"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    _, _, run = train_run(recipe, whole, *given)
    train_run(recipe, halves, *given, "train.steps=1")
    _, _, resumed = train_run(recipe, halves, *given, "resume=auto")
    assert resumed.learner.fingerprint() == run.learner.fingerprint()
    assert timeless(lines(halves / "metrics.jsonl")) == timeless(lines(whole / "metrics.jsonl"))
    with pytest.raises(RunError, match=r"teacher\.models\[\]\.path.*the run used"):
        train_run(recipe, halves, *given, f"teacher.path={models / 'u'}", "train.steps=3", "resume=auto")


def test_the_base_of_an_adapter_is_a_teacher_without_memory_and_other_teachers_are_counted(
    recipe: Path, models: Path
) -> None:
    def parts(*options: str) -> dict[str, float]:
        config = load(recipe, [*options, "sampling.temperature=1"])[0]
        found = read_model_config(str(models / "m"))
        workload = workload_of(config, found, "train", longest=64, prompt=16)
        return {part.name: part.bytes for part in predict(config, found, workload).parts}

    base = ["model.lora=4", f"teacher.path={models / 'm'}"]
    assert "teachers" not in parts(*base)
    assert parts(f"teacher.path={models / 't'}")["teachers"] == pytest.approx(
        4 * tiny_model().num_parameters(), rel=0.01
    )
    half = parts(f"teacher.path={models / 't'}", "teacher.dtype=bfloat16")["teachers"]
    assert half == pytest.approx(2 * tiny_model().num_parameters(), rel=0.01)
    learner = assemble(load(recipe, [*base, "output=" + str(models / "shared")])[0]).learner
    assert learner.teacher_fingerprints()["teacher"] == learner.base_fingerprint()


def test_the_sources_of_local_teachers_are_those_of_the_recipe(recipe: Path, models: Path) -> None:
    config = load(recipe, ["model.lora=4", f"teacher.path={models / 'm'}", "teacher.bits=4", "teacher.dtype=bfloat16"])[
        0
    ]
    source = assembly.teacher_sources(config)["teacher"]
    assert source is not None
    assert (source.path, source.quantization.bits, source.dtype) == (str(models / "m"), 4, "bfloat16")
    assert source.lora.rank is None


def test_a_context_that_does_not_end_where_the_turn_begins_fails_its_conversation(recipe: Path, tmp_path: Path) -> None:
    from turnwise.errors import RolloutError

    with pytest.raises(
        RolloutError, match="with_the_turn returned messages that end with a message of the role 'assist"
    ):
        train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:with_the_turn", "train.steps=1")


def test_a_teacher_with_other_token_ids_is_refused_with_the_first_difference(
    recipe: Path, models: Path, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    other = tmp_path / "other"
    tiny_model(3, vocabulary=len(tokenizer)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(
        ConfigError, match=r"the token '<one more>' has the id none in the student and \d+ in the teacher"
    ):
        assemble(load(recipe, [f"teacher.path={other}", f"output={tmp_path / 'run'}"])[0])
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        assemble(load(recipe, [f"teacher.path={tmp_path / 'nothing'}", f"output={tmp_path / 'run'}"])[0])


def teaching(kind: str, model: Any, **changes: Any) -> Callable[[dict[str, Any], int], Answer]:
    """Answers in the form of a server's API, computed by the model. `changes`: what is wrong with them."""
    tokenizer = byte_tokenizer()

    def answer(question: dict[str, Any], number: int) -> Answer:
        if not question:  # /v1/models
            return Answer({"data": [{"id": "t"}]})
        ids = question["prompt"] if kind == "vllm" else question["input_ids"]
        k = question["prompt_logprobs"] if kind == "vllm" else question["top_logprobs_num"]
        with torch.no_grad():
            rows_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [None] + [rows_TV[place] for place in range(len(ids) - 1)]
        text = [changes.get("text", tokenizer.decode([id])) for id in ids]
        if kind == "vllm":
            entries = [
                None
                if row is None
                else {
                    str(id): {"logprob": float(row[id]), "rank": 1 + n, "decoded_token": tokenizer.decode([id])}
                    for n, id in enumerate([*row.topk(k).indices.tolist()])
                }
                | {str(ids[place]): {"logprob": float(row[ids[place]]), "rank": 9, "decoded_token": text[place]}}
                for place, row in enumerate(places)
            ]
            return Answer(
                {"choices": [{"prompt_logprobs": entries[changes.get("lost", 0) :]}]}, seconds=changes.get("seconds", 0)
            )
        start = question["logprob_start_len"]
        own = [
            [None if row is None else float(row[id]), id, text[n]]
            for n, (id, row) in enumerate(zip(ids, places, strict=True))
        ]
        top = [
            None if row is None else [[float(row[id]), id, None] for id in row.topk(k).indices.tolist()]
            for row in places
        ]
        own[start][0] = top[start] = None
        about = {"input_token_logprobs": own[start + changes.get("lost", 0) :], "input_top_logprobs": top[start:]}
        return Answer({"meta_info": about}, seconds=changes.get("seconds", 0))

    return answer


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_teacher_on_a_server_gives_what_a_local_teacher_gives(
    kind: str, recipe: Path, models: Path, tmp_path: Path
) -> None:
    options = ["teacher.signal=divergence", "teacher.top_k=3", "train.steps=1", "credit=none"]
    model = Qwen3ForCausalLM.from_pretrained(models / "t")
    _, (local,), _ = train_run(recipe, tmp_path / "local", f"teacher.path={models / 't'}", *options)
    with serving(teaching(kind, model)) as server:
        given = [f"teacher.url={server.url}", f"teacher.server={kind}"]
        _, (remote,), _ = train_run(recipe, tmp_path / "remote", *given, *options)
    for name in ("teacher/loss", "teacher/divergence", "teacher/divergence_turn", "grad_norm", "loss"):
        assert remote[name] == pytest.approx(local[name], rel=1e-3, abs=1e-5)
    assert remote["teacher/agreement"] == local["teacher/agreement"]
    # what is wrong with a server is told before the model is loaded, or in the conversations
    for changes, problem in (
        ({"text": "other"}, "has another vocabulary than the student: the token"),
        ({"lost": 1}, "log-probabilities for the last"),
        ({"seconds": 60.0}, "gave no answer within 0.2 s"),
    ):
        limit = 0.2 if "seconds" in changes else 60
        with serving(teaching(kind, model, **changes)) as server:
            given = [f"teacher.url={server.url}", f"teacher.server={kind}", f"output={tmp_path / 'refused'}"]
            config = load(recipe, [*given, *options, f"teacher.timeout={limit}"])[0]
            with pytest.raises(ConfigError, match=problem):
                assemble(config)
    with pytest.raises(ConfigError, match="cannot score tokens"):  # it has gone
        assemble(load(recipe, [*given, *options])[0])


def test_the_time_limit_of_a_server_is_that_of_all_sequences() -> None:
    """Each answer comes within the limit, and those of the last of five groups of 32 come after it."""
    answer = {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]}]}

    def slowly(question: dict[str, Any], number: int) -> Answer:
        return Answer(answer if question else {"data": [{"id": "t"}]}, seconds=0.4 if question else 0.0)

    with serving(slowly) as server:
        scoring = ScoringServer(server.url, "vllm", timeout=1.0)
        found = asyncio.run(scoring.score([([1, 2], [1])] * 160, 1))
    problems = [str(one) for one in found if isinstance(one, EngineError)]
    assert problems
    assert all("gave no answer within 1 s, the time for all 160 sequences" in one for one in problems)


def nameless(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"x": 1}]}, {"role": "tool", "content": "y"}]


def halved(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "\ud83d"}]


@pytest.mark.parametrize(("function", "told"), [(nameless, "KeyError: "), (halved, "half of a surrogate pair")])
def test_messages_of_a_context_that_cannot_be_encoded_fail_the_conversation(function: Any, told: str) -> None:
    trajectory = Trajectory(id="a", group="g", row=Row(id="g", messages=[]), turns=[Turn(index=0, message={}, text="")])
    use = Use.model_validate(f"{HERE}:{function.__name__}")
    with pytest.raises(Failed) as failed:
        _prompt(use, RENDERER)(trajectory, 0)
    assert failed.value.failure.kind == "teacher"
    assert failed.value.failure.message.startswith(f"teacher.context: {function.__name__}, turn 0: ")
    assert told in failed.value.failure.message


def same(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    return trajectory.messages[: turn.message_index]


def shouts(trajectory: Trajectory, turn: Turn) -> list[dict[str, Any]]:
    messages = trajectory.messages[: turn.message_index]
    messages[0]["content"] = trajectory.row.fields["answer"] = "CHANGED"
    return messages


def test_what_a_context_changes_in_place_stays_out_of_the_record(recipe: Path, tmp_path: Path) -> None:
    trajectories, _, _ = train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:shouts", "train.steps=1")
    assert trajectories
    assert "CHANGED" not in json.dumps(trajectories)


def test_a_context_shows_its_images_to_the_teacher(tmp_path: Path) -> None:
    """A context with the messages of the student is what the student read: without the images, the teacher would differ."""
    recipe = save_image_recipe(tmp_path)
    options = ["credit=none", "train.steps=1", "limits.turns=1"]
    _, (metrics,), _ = train_run(recipe, tmp_path / "run", f"teacher.context={HERE}:same", *options)
    assert metrics["teacher/divergence"] == pytest.approx(0.0, abs=1e-4)


def test_a_row_that_names_no_teacher_is_refused() -> None:
    teachers = {"models": [{"name": "a", "path": "x"}, {"name": "b", "path": "y"}], "column": "teacher"}
    config = checked({"model": "m", "data": {"train": "rows.jsonl"}, "teacher": teachers}, source="recipe")
    row: Callable[..., Row] = lambda **fields: Row(id="7", messages=[], fields=fields)  # noqa: E731
    refuse_unknown_teachers(config, [row(teacher="a")])
    with pytest.raises(ConfigError, match="row 7 has 'c', and the teachers are a, b"):
        refuse_unknown_teachers(config, [row(teacher="c")])
    with pytest.raises(ConfigError, match="row 7 has no such column"):
        refuse_unknown_teachers(config, [row(answer="1")])


@pytest.mark.parametrize(
    ("teacher", "others", "problem"),
    [
        ({}, {"credit": "none"}, "the recipe has no teacher"),
        ({"coef": 2.0}, {}, "coef has no effect without a teacher"),
        ({"path": "t", "url": "http://h"}, {}, "path and url are two teachers"),
        ({"server": "sglang"}, {}, "server has no effect without url"),
        ({"dtype": "bfloat16", "context": "f.py:g"}, {}, "dtype has an effect on a local teacher only"),
        ({"name": "t"}, {}, "a teacher needs path"),
        ({"path": "t", "beta": 0.2}, {}, "beta has no effect with signal=sampled"),
        ({"path": "t", "signal": "divergence", "beta": 0.2}, {}, "beta has no effect with divergence=reverse_kl"),
        ({"path": "t", "signal": "divergence", "gamma": 0.5}, {}, "gamma has no effect with signal=divergence"),
        ({"path": "t", "signal": "divergence", "clip": 5}, {}, "clip has no effect with signal=divergence"),
        ({"path": "t", "top_k": 5}, {}, "top_k has no effect with signal=sampled"),
        ({"path": "t", "column": "teacher"}, {}, "column has no effect with one teacher"),
        ({"path": "t", "weight": 2.0}, {}, "weight has no effect with one teacher"),
        ({"path": "t", "timeout": 9.0}, {}, "timeout has no effect without a teacher on a server"),
        ({"url": "http://h", "signal": "divergence"}, {}, "the teacher 'teacher' is on a server: set teacher.top_k"),
        ({"context": "f.py:g", "signal": "divergence"}, {}, "the teacher 'teacher' has another context"),
        ({"models": [{"path": "t"}, {"path": "u"}]}, {}, "have the name 'teacher'"),
        ({"models": [{"path": "t"}], "path": "u"}, {}, "path belongs to one teacher"),
        (
            {
                "models": [{"name": "t", "path": "t"}, {"name": "u", "path": "u"}],
                "signal": "divergence",
                "top_k": 5,
            },
            {},
            "top_k of several teachers cannot be mixed",
        ),
        ({"path": "m"}, {}, "is the model that is trained"),
        ({"path": "t", "signal": "divergence"}, {"sampling": {"top_p": 0.9}}, "sampling.top_p cuts them"),
        ({"url": "http://h"}, {"sampling": {"temperature": 0.7}}, "set sampling.temperature=1"),
        (
            {"path": "t", "signal": "divergence"},
            {"cluster": {"launcher": "torchrun"}},
            "needs the teacher's output layer in one process",
        ),
        ({"path": "t"}, {"credit": "none", "train": {"dynamic_sampling": 1}}, "train.dynamic_sampling has no effect"),
        (
            {"path": "t"},
            {"credit": "none", "reward": {"kl": {"coef": 0.1}}},
            "reward.kl.coef has no effect with credit=none",
        ),
        (
            {"path": "t", "signal": "divergence"},
            {"credit": "none", "train": {"ppo_epochs": 2}, "loss": {"clip_low": 0.1}},
            "loss.clip_low has no effect with credit=none and teacher.signal=divergence",
        ),
        (
            {"path": "t", "signal": "divergence"},
            {"credit": "none", "train": {"ppo_epochs": 2, "max_staleness": 1}, "correction": {"action": "truncate"}},
            "correction.action=truncate has no effect with credit=none and teacher.signal=divergence",
        ),
    ],
)
def test_options_of_teachers_without_effect_are_refused(
    teacher: dict[str, Any], others: dict[str, Any], problem: str
) -> None:
    recipe = {"model": "m", "data": {"train": "rows.jsonl"}, "teacher": teacher, **others}
    with pytest.raises(ConfigError) as error:
        refuse_without_effect(checked(recipe, source="recipe"))
    assert problem in str(error.value)


def test_a_teacher_alone_needs_no_reward_and_no_group() -> None:
    config = checked(
        {
            "model": "m",
            "data": {"train": "rows.jsonl"},
            "teacher": "t",
            "credit": "none",
            "train": {"group_size": 1},
        },
        source="recipe",
    )
    refuse_without_effect(config)
    refuse_without_reward(config)
