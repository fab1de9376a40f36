"""Runs whose environment opens agents: their turns are trained on with their own advantages, recorded, replayed and evaluated."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from support.recipes import save_recipe
from support.servers import Answer, serving
from support.tiny import save_model, save_rows
from support.training import train_run
from turnwise import assembly
from turnwise.assembly.runners import rollout_worker, worker_recipe
from turnwise.cli import main
from turnwise.config.policy_checks import refuse_unusable_policies
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.models.lora import has_adapter
from turnwise.options.schema import Config
from turnwise.ray_workers.rollout_worker import unpickled
from turnwise.record.datasets import DatasetChoice, write_dataset
from turnwise.record.metric_names import METRICS, metric_of
from turnwise.record.reader import episodes, read
from turnwise.rollout.rollout import new_group
from turnwise.rollout_server.wire import fill_trajectory, finished_event, take_over
from turnwise.runs.replay import replay
from turnwise.types import Trajectory

RECIPES = Path(__file__).parents[2] / "recipes"
LIKING = """
from turnwise import Opening, Reply, SamplingChange, current_episode, environment

CUT = SamplingChange(max_tokens=4, answers_cut=True)

def liking(turn):
    ids = turn.completion.token_ids if turn.completion else turn.text.encode()
    return sum((n + 1) * token for n, token in enumerate(ids)) % 97 / 97

"""
"""How the files of both games begin: a number of a turn's tokens."""
GAME = '''
@environment
async def game(row):
    """Two sides; a referee that is not trained on sees both."""
    episode = current_episode()
    async with episode.agent("second", messages=row.messages, sampling=CUT) as second:
        first = yield Opening(messages=row.messages, sampling=CUT)
        other = await second.turn()
        async with episode.agent("referee", messages=row.messages, train=False, sampling=CUT) as referee:
            await referee.turn(f"{first.text} or {other.text}?")
        won = liking(first) - liking(other)
        second.add_reward(-won)
        yield Reply(reward=won, done=True)
'''


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(LIKING + GAME, encoding="utf-8")
    rows = {"train": str(save_rows(tmp_path / "train.jsonl", 4)), "eval": str(save_rows(tmp_path / "eval.jsonl", 2))}
    return save_recipe(
        tmp_path,
        model,
        environment=f"{tmp_path}/game.py:game",
        data=rows,
        limits={"turns": 2, "tokens_per_turn": 5},
        train={"steps": 2, "batch_size": 2, "group_size": 3, "lr": 0.01},
        checkpoint={"every": 1},
        deterministic=True,
    )


OPPONENTS = """
@environment
async def game(row, policies=("past", "still")):
    episode = current_episode()
    first = yield Opening(messages=row.messages, sampling=CUT)
    for name in policies:
        async with episode.agent("second", messages=row.messages, policy=name, sampling=CUT) as second:
            await second.turn()
            second.add_reward(0.5)
    async with episode.agent("third", messages=row.messages, sampling=CUT) as third:
        third.add_reward(liking(await third.turn()))
    yield Reply(reward=liking(first), done=True)
"""


def by_agent(trajectories: list[dict[str, Any]], step: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in trajectories:
        if one["step"] == step:
            found.setdefault(one.get("agent", ""), []).append(one)
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in ("seconds", "started")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_agents_are_trained_on_with_their_own_advantages_and_a_resumed_run_has_the_same_bits(
    recipe: Path, tmp_path: Path
) -> None:
    trajectories, metrics, run = train_run(recipe, tmp_path / "whole")
    sides = by_agent(trajectories, 1)
    assert {name: len(of_name) for name, of_name in sides.items()} == {"": 6, "second": 6, "referee": 6}
    rows = list(dict.fromkeys(one["row"]["id"] for one in sides[""]))
    for name in ("", "second"):
        groups = {one["group"] for one in sides[name]}
        assert groups == {f"1.{place}:{row}{'/second' if name else ''}" for place, row in enumerate(rows)}
        for group in groups:  # GRPO: centred in the group of its side
            advantages = [one["turns"][0]["advantage"] for one in sides[name] if one["group"] == group]
            assert sum(advantages) == pytest.approx(0, abs=1e-6)
            assert any(advantages)
    for one in sides["second"]:
        (first,) = [other for other in sides[""] if other["id"] == one["episode"]]
        assert one["reward"] == -first["reward"]
    for one in sides["referee"]:
        assert (one["trained"], one["turns"][0]["weight"], one["turns"][0]["advantage"]) == (False, 0.0, None)
    assert metrics[0]["agents/second/reward/mean"] == pytest.approx(-metrics[0]["reward/mean"])
    assert metrics[0]["agents/referee/conversations"] == 1.0
    found = {metric.name for name in metrics[0] if (metric := metric_of(name)) is not None}
    assert {metric.name for metric in METRICS if metric.name.startswith("agents/")} <= found
    of_sides = [one for name in ("", "second") for one in sides[name]]
    tokens = sum(turn >= 0 for one in of_sides for segment in one["segments"] for turn in segment["turn"])
    assert metrics[0]["tokens/trained"] == tokens
    train_run(recipe, tmp_path / "resumed", "train.steps=1")
    resumed, _, _ = train_run(recipe, tmp_path / "resumed", "resume=auto")
    assert timeless(resumed) == timeless(trajectories)
    assert run.step == 2


def test_the_record_of_an_episode_is_read_replayed_and_made_a_data_set(recipe: Path, tmp_path: Path) -> None:
    assert main(["rollout", str(recipe), "--out", str(tmp_path / "out"), "rollout.samples_per_row=3"]) == 0
    recorded = list(read(tmp_path / "out"))
    assert [one.agent for one in recorded[:6]] == ["second", "referee", ""] * 2
    whole = episodes(recorded)
    assert [[agent.agent for agent in one.agents] for one in whole] == [["second", "referee"]] * 12
    replayed = asyncio.run(replay(tmp_path / "out"))
    assert len(replayed) == 36
    assert [one for one in replayed if one.differences or one.skipped] == []
    write_dataset(tmp_path / "out", tmp_path / "dpo", DatasetChoice(what="dpo"))
    pairs = [json.loads(line) for line in (tmp_path / "dpo" / "train.jsonl").read_text().splitlines()]
    assert {pair["group"].rpartition("/")[2] for pair in pairs if "/" in pair["group"]} == {"second"}


def test_an_evaluation_goes_on_with_whole_episodes(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["eval", str(recipe), "--out", str(out), "eval.samples_per_row=2"]) == 0
    (file,) = out.glob("*/trajectories.jsonl")
    complete = file.read_bytes()
    kept = complete.splitlines(keepends=True)
    assert len(kept) == 12
    file.write_bytes(b"".join(kept[:8]))  # two episodes, and the agents of a third
    capsys.readouterr()
    assert main(["eval", str(recipe), "--out", str(out), "eval.samples_per_row=2", "resume=auto"]) == 0
    assert "2 of 4 conversations are finished already" in capsys.readouterr().out
    whole = [json.loads(line) for line in file.read_bytes().splitlines()]
    before = [json.loads(line) for line in kept]
    assert timeless(whole[:6]) == timeless(before[:6])
    assert [(one["id"], one["reward"]) for one in whole] == [(one["id"], one["reward"]) for one in before]
    capsys.readouterr()
    assert main(["show", str(out), "--id", "1/0/second"]) == 0
    assert "second" in capsys.readouterr().out


def test_a_rollout_server_sends_the_agents_with_their_tokens(recipe: Path, tmp_path: Path) -> None:
    assert main(["rollout", str(recipe), "--out", str(tmp_path / "out"), "rollout.max_rows=1"]) == 0
    (done,) = episodes(read(tmp_path / "out"))[:1]
    for each in (done, *done.agents):  # as on a server, whose ids begin with those of the request
        each.id = f"request7/{each.id}"
    event = json.loads(finished_event(done, id="1/0").removeprefix(b"data: "))
    given = Trajectory(id="1/0", group="1", row=done.row)
    fill_trajectory(given, event, where="the server", sent=0.0)
    assert [(agent.id, agent.episode, agent.agent) for agent in given.agents] == [
        ("1/0/second", "1/0", "second"),
        ("1/0/referee", "1/0", "referee"),
    ]
    assert given.agents[0].segments[0].token_ids == done.agents[0].segments[0].token_ids
    assert given.agents[1].trained is False


@pytest.mark.parametrize(("ahead", "moved"), [(0.0, 0.0), (3600.0, -3600.0), (-3600.0, 3597.0)])
def test_the_times_of_a_machine_with_another_clock_are_moved_to_when_its_conversation_was_asked_for(
    ahead: float, moved: float, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent at 1000, begun 3 s later, with a turn 1 s later; it took 5 s."""
    assert main(["rollout", str(recipe), "--out", str(tmp_path / "out"), "rollout.max_rows=1"]) == 0
    (done,) = episodes(read(tmp_path / "out"))[:1]
    done.started, done.seconds, done.turns[0].started = 1003.0 + ahead, 5.0, 1004.0 + ahead
    done.agents[0].started = 1004.0 + ahead
    monkeypatch.setattr("turnwise.rollout_server.wire.time.time", lambda: 1008.0)
    given = Trajectory(id=done.id, group=done.group, row=done.row)
    take_over(given, done, sent=1000.0)
    began = 1003.0 + ahead + moved
    assert (given.started, given.turns[0].started, given.agents[0].started) == (began, began + 1, began + 1)
    assert 1000.0 <= began <= 1003.0


def exploitability(shares: dict[str, float], rock: float = 2.0) -> float:
    """What the best answer wins against these shares of moves; 0 at the equilibrium R 1/4, P 1/2, S 1/4."""
    total = sum(shares.values())
    r, p, s = (shares[move] / total for move in "RPS")
    return max(rock * s - p, r - s, p - rock * r)


def test_the_equilibrium_of_the_game_cannot_be_exploited_and_other_play_can() -> None:
    assert exploitability({"R": 0.25, "P": 0.5, "S": 0.25}) == 0
    assert exploitability({"R": 1, "P": 1, "S": 1}) == pytest.approx(1 / 3)
    assert exploitability({"R": 1, "P": 0, "S": 0}) == 1


@pytest.mark.slow
def test_self_play_comes_to_the_equilibrium_on_average(model: Path, tmp_path: Path) -> None:
    """In a zero-sum game, the play of single steps goes round the equilibrium, and its average comes close to it (recipes)."""
    path = save_recipe(
        tmp_path,
        model,
        environment=f"{RECIPES}/rock_paper_scissors.py:rock_paper_scissors",
        data={"train": str(save_rows(tmp_path / "train.jsonl", 1))},
        credit={"name": "grpo", "scale": "none"},
        loss={"entropy_coef": 0.3},
        limits={"turns": 2, "tokens_per_turn": 4},
        train={"steps": 130, "batch_size": 1, "group_size": 64, "lr": 0.004},
        checkpoint={"every": 1000},
        record={"every": 1000},
        deterministic=True,
    )
    _, metrics, _ = train_run(path, tmp_path / "run")
    later = [{move: line[f"metrics/{move}"] for move in "RPS"} for line in metrics[50:]]
    average = {move: fmean(shares[move] for shares in later) for move in "RPS"}
    assert sum(average.values()) > 0.85  # both sides have learnt to answer with a move
    assert exploitability(average) < 0.2
    assert fmean(map(exploitability, later)) > exploitability(average)
    for side in ("reward/mean", "agents/second/reward/mean"):
        assert abs(fmean(line[side] for line in metrics[50:])) < 0.4  # neither side is the stronger one


# frozen policies


@pytest.fixture
def opponents(recipe: Path, tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(LIKING + OPPONENTS, encoding="utf-8")
    return recipe


@pytest.mark.slow
def test_frozen_policies_take_turns_with_their_own_weights_and_sampling_and_are_not_trained_on(
    opponents: Path, model: Path, tmp_path: Path
) -> None:
    """`still` is the model before training at temperature 0, so it says the same in all steps; `past` is the reference model,
    which becomes the trained model after each step. A resumed run has the same bits."""
    policies = f"policies={{past: {{reference: true, temperature: 0}}, still: {{path: '{model}', temperature: 0}}}}"
    sync = ["reference.sync_every=1", "reference.sync_weight=1"]
    overrides = [policies, *sync, "train.lr=0.3", "train.steps=3", "train.batch_size=4", "train.group_size=2"]
    trajectories, metrics, _ = train_run(opponents, tmp_path / "whole", *overrides)
    played = [one for one in trajectories if one.get("policy")]
    assert {(one["agent"], one["policy"]) for one in played} == {("second", "past"), ("second", "still")}
    for one in played:
        assert (one["trained"], one["turns"][0]["weight"], one["turns"][0]["advantage"]) == (False, 0.0, None)
        assert (one["reward"], one["group"].rpartition("/")[2]) == (0.5, f"second@{one['policy']}")
    said: dict[str, dict[tuple[int, str], str]] = {"past": {}, "still": {}}
    for one in played:
        assert (
            said[one["policy"]].setdefault((one["step"], one["row"]["id"]), one["turns"][0]["text"])
            == (one["turns"][0]["text"])
        )  # greedy: the same in all conversations of a row
    first = {row: text for (step, row), text in said["still"].items() if step == 1}
    for policy, same in (("still", True), ("past", False)):
        later = {row: text for (step, row), text in said[policy].items() if step == 3}
        assert (later == first) is same
    assert {row: text for (step, row), text in said["past"].items() if step == 1} == first
    of_sides = [one for one in trajectories if one["step"] == 1 and not one.get("policy")]
    tokens = sum(turn >= 0 for one in of_sides for segment in one["segments"] for turn in segment["turn"])
    assert metrics[0]["tokens/trained"] == tokens
    assert (metrics[0]["agents/second@still/reward/mean"], metrics[0]["agents/third/conversations"]) == (0.5, 1.0)
    assert "agents/second/conversations" not in metrics[0]
    train_run(opponents, tmp_path / "resumed", *overrides, "train.steps=2")
    resumed, _, _ = train_run(opponents, tmp_path / "resumed", *overrides, "resume=auto")
    assert timeless(resumed) == timeless(trajectories)
    assert [one for one in asyncio.run(replay(tmp_path / "whole")) if one.differences or one.skipped] == []


def test_a_replay_writes_the_conversations_of_a_policy_with_its_own_tokenizer_and_template(
    opponents: Path, tmp_path: Path
) -> None:
    """The policy's vocabulary has two letters exchanged, and its template another beginning."""
    other = save_model(tmp_path / "other")
    file = other / "tokenizer.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = written["model"]["vocab"]
    vocabulary["e"], vocabulary["o"] = vocabulary["o"], vocabulary["e"]
    file.write_text(json.dumps(written), encoding="utf-8")
    template = other / "chat_template.jinja"
    template.write_text("oe " + template.read_text(encoding="utf-8"), encoding="utf-8")
    overrides = [f"policies={{other: '{other}'}}", "environment.arguments.policies=[other]", "train.steps=1"]
    trajectories, _, _ = train_run(opponents, tmp_path / "run", *overrides)
    (played,) = {tuple(one["segments"][0]["token_ids"][:2]) for one in trajectories if one.get("policy") == "other"}
    assert played == (vocabulary["o"], vocabulary["e"])
    replayed = asyncio.run(replay(tmp_path / "run"))
    assert len(replayed) == len(trajectories)
    assert [one for one in replayed if one.differences or one.notes or one.skipped] == []
    template.write_text("o" + template.read_text(encoding="utf-8"), encoding="utf-8")
    changed = [one for one in asyncio.run(replay(tmp_path / "run")) if one.differences]
    assert {one.id for one in changed} == {one["id"] for one in trajectories if one.get("policy") == "other"}
    assert all(one.differences[0].startswith("segments[0].token_ids") for one in changed)


def test_what_a_policy_is_made_of_is_what_the_recipe_says(opponents: Path, model: Path) -> None:
    of_policy = "dtype: bfloat16, memory_gb: 0.25, top_p: 0.5, top_k: 3, min_p: 0.1"
    overrides = [f"policies={{other: {{path: '{model}', {of_policy}}}, base: '{model}'}}", "model.lora=4"]
    config, _ = load(opponents, [*overrides, "sampling.temperature=0.7"])
    whole: Any = assembly.engine_model(config, adapter=True)
    made = assembly.agent_policies(config, assembly.renderer(config), whole)
    sampled = made["other"].sampling
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.min_p) == (0.7, 0.5, 3, 0.1)
    engines: Any = [made[name].engine for name in ("other", "base")]
    other, base = engines
    assert (next(other._models[0].parameters()).dtype, other._core.cache.kv.budget_bytes) == (torch.bfloat16, 2**28)
    # the model under the adapter has the same weights in memory, and not the adapter
    assert base._models[0].get_input_embeddings().weight is whole.get_input_embeddings().weight
    assert not has_adapter(base._models[0])
    (source,) = assembly.policy_sources(load(opponents, [f"policies={{q: {{path: '{model}', bits: 4}}}}"])[0]).values()
    assert source is not None
    assert source.quantization.bits == 4


def test_a_policy_on_a_server_takes_turns_in_text(opponents: Path, tmp_path: Path) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}

    def answer(question: dict[str, Any], number: int) -> Answer:
        return Answer(
            {"choices": [{"message": {"content": f"four {number}"}, "finish_reason": "stop"}], "usage": usage}
        )

    with serving(answer) as server:
        endpoint = f"{{url: '{server.url}/v1', model: m, request: {{seed: null}}}}"
        overrides = [f"policies={{strong: {{endpoint: {endpoint}, temperature: 0.25}}}}", "deterministic=false"]
        overrides += ["environment.arguments.policies=[strong]", "train.steps=1", "train.batch_size=1"]
        trajectories, metrics, _ = train_run(opponents, tmp_path / "run", *overrides)
    played = [one for one in trajectories if one.get("policy") == "strong"]
    # the first two are those of the evaluation before training
    assert sorted(one["messages"][-1]["content"] for one in played) == ["four 2", "four 3", "four 4"]
    assert {(one["temperature"], one["model"], "seed" in one) for one in server.asked} == {(0.25, "m", False)}
    assert metrics[0]["agents/second@strong/tokens/sampled"] == 6
    assert metrics[0]["tokens/trained"] > 0


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ("{a: {temperature: 0.5}}", "a policy needs path .a local model., endpoint"),
        ("{a: {path: m, reference: true}}", "path and reference are two policies"),
        ("{a: {reference: true, bits: 4}}", "bits has no effect without path"),
        ("{a: {endpoint: {url: u, model: m}, memory_gb: 1}}", "memory_gb has no effect on a policy on a server"),
        ("{a: {endpoint: {url: u, model: m}, top_k: 5}}", "top_k is not in the"),
        ("{a: 3}", "the policy 'a' is 3: write"),
        ("[{name: a, path: m}, {name: a, path: n}]", "two policies have the name 'a'"),
        ("{'a b': m}", "policies.0.name"),
        ("{a: {endpoint: {url: u, model: m}}}", "does not guarantee equal results: remove deterministic=true"),
    ],
)
def test_policies_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    opponents: Path, policies: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_without_effect(load(opponents, [f"policies={policies}"])[0])


def test_without_training_the_reference_model_is_that_of_reference_path(
    opponents: Path, model: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", seed=9)
    recipe, _ = load(opponents, ["policies={past: {reference: true}}"])
    evaluated: Any = assembly.engine_model(recipe)
    renderer = assembly.renderer(recipe)
    with pytest.raises(ConfigError, match="without training there is no model before training"):
        assembly.agent_policies(recipe, renderer, evaluated)
    with_path = recipe.model_copy(update={"reference": recipe.reference.model_copy(update={"path": str(other)})})
    engine: Any = assembly.agent_policies(with_path, renderer, evaluated)["past"].engine
    expected: Any = assembly.engine_model(
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(other)})})
    )
    (played, own, wanted) = (one.get_input_embeddings().weight for one in (engine._models[0], evaluated, expected))
    assert torch.equal(played, wanted)
    assert not torch.equal(played, own)

    async def serve(config: Config) -> None:
        async with assembly.conversation_host(config, renderer):
            pass

    for config in (recipe, with_path):
        with pytest.raises(ConfigError, match="changes the weights of the model here"):
            asyncio.run(serve(config))


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ("sampling.response_format={type: json_object}", "response_format"),
        ("tool_calls.choice=required", "tool_choice"),
    ],
)
def test_a_form_of_turns_that_a_policy_on_a_server_would_ignore_is_refused(
    opponents: Path, asked: str, field: str
) -> None:
    def check(request: str) -> None:
        endpoint = f"{{url: u, model: m, request: {{{request}}}}}"
        options = [f"policies={{a: {{endpoint: {endpoint}}}}}", "deterministic=false", asked]
        refuse_unusable_policies(load(opponents, options)[0])

    with pytest.raises(ConfigError, match=rf"also holds for the policy 'a'.*endpoint\.request\.{field}"):
        check("seed: null")
    check(f"{field}: null")


def test_a_policy_with_another_template_has_the_recipes_options_as_far_as_it_takes_them(
    opponents: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def variant(name: str, reads: str) -> Path:
        path = save_model(tmp_path / name)
        template = path / "chat_template.jinja"
        template.write_text(reads + template.read_text(encoding="utf-8"), encoding="utf-8")
        return path

    thinking = "{% if enable_thinking is defined and not enable_thinking %}NOTHINK {% endif %}"
    trained, reads, other = variant("trained", thinking), variant("reads", f"X {thinking}"), variant("other", "Y ")
    options = ["model.chat_template_kwargs={enable_thinking: false}", "sampling.response_format={type: json_object}"]
    config, _ = load(opponents, [f"model.path={trained}", f"policies={{reads: '{reads}', other: '{other}'}}", *options])
    renderer = assembly.renderer(config)
    made = assembly.agent_policies(config, renderer, None)
    for name, arguments in (("reads", {"enable_thinking": False}), ("other", {})):
        own = made[name].renderer
        assert own is not None
        assert own is not renderer
        assert (own.template.arguments, own.constrained) == (arguments, renderer.constrained)
    assert [record.message for record in caplog.records if "enable_thinking" in record.message] == [
        "the policy 'other' is prompted without model.chat_template_kwargs ['enable_thinking']: its chat template never "
        "reads them"
    ]


def test_an_agent_with_an_unknown_policy_or_a_trained_one_fails_its_conversation(
    opponents: Path, model: Path, tmp_path: Path
) -> None:
    overrides = ["rollout.max_rows=1", f"policies={{opponent: '{model}'}}"]
    for name in ("oponent", "opponent"):
        arguments = f"environment.arguments.policies=[{name}]"
        assert main(["rollout", str(opponents), "--out", str(tmp_path / name), *overrides, arguments]) == (
            1 if name == "oponent" else 0
        )
    (failed,) = read(tmp_path / "oponent")
    assert failed.error is not None
    assert "names the policy 'oponent', and the recipe has 'opponent'; did you mean" in failed.error.message


def test_a_script_has_the_turns_of_agents_and_of_frozen_policies(
    opponents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.jsonl"
    agents = {"second": ["a1"], "second/2": ["a2"], "third": ["a3"]}
    overrides = ["engine.name=scripted", f"engine.script={script}", "policies={past: nowhere, still: nowhere}"]

    def play(line: Any, out: str) -> int:
        script.write_text(json.dumps(line) + "\n", encoding="utf-8")
        return main(["rollout", str(opponents), "--out", str(tmp_path / out), *overrides])

    assert play({"turns": ["hi"], "agents": agents}, "out") == 0
    said = [(one.agent, one.policy, [turn.text for turn in one.turns]) for one in read(tmp_path / "out")]
    assert said == [("second", "past", ["a1"]), ("second", "still", ["a2"]), ("third", "", ["a3"]), ("", "", ["hi"])]
    assert play({"turns": ["hi"], "agents": {"second": "a1"}}, "bad") == 1
    assert "a script is a list of texts" in capsys.readouterr().err
    assert play(["hi"], "none") == 1
    (_, failed) = read(tmp_path / "none")
    assert failed.error is not None
    assert "there is no script for the conversation" in failed.error.message


def test_a_rollout_worker_runs_agents_and_frozen_policies_by_a_pickled_recipe(opponents: Path, model: Path) -> None:
    """What a worker on Ray does with the recipe and the trajectories that it is sent, in this process."""
    overrides = [f"policies={{past: '{model}', still: {{path: '{model}', temperature: 0}}}}", "deterministic=false"]
    config, _ = load(opponents, overrides)
    (row,) = assembly.rows(config, limit=1)
    (empty,) = new_group(row, size=1, seed=0).trajectories
    sent = pickle.dumps((worker_recipe(config, 0), empty))

    async def run() -> Trajectory:
        received, trajectory = pickle.loads(sent)
        async with rollout_worker(received, "worker 0") as worker:
            return unpickled(await worker.run(pickle.dumps(trajectory), assembly.sampling(received)))

    take_over(empty, asyncio.run(run()), sent=0.0)
    assert empty.error is None
    assert [(one.agent, one.policy, one.trained, one.error) for one in empty.agents] == [
        ("second", "past", False, None),
        ("second", "still", False, None),
        ("third", "", True, None),
    ]
    assert all(one.row is empty.row and one.episode == empty.id and one.segments for one in empty.agents)
