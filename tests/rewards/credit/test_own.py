"""`credit: file.py:function`: an estimator of the user, its arguments, what it declares, and what it may return."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rewards.credit.test_credit_invariance import batch
from turnwise import assembly
from turnwise.config.recipe import checked, load
from turnwise.config.resume_rules import RULES, option_values
from turnwise.config.train_checks import chosen_estimator, needs_critic, refuse_without_effect
from turnwise.doctor.recipe import own_estimator
from turnwise.errors import ConfigError
from turnwise.options.algorithm import OwnCredit, Rloo
from turnwise.options.schema import Config
from turnwise.recipe import Recipe
from turnwise.rewards.credit import credit_of
from turnwise.rewards.credit.own import own
from turnwise.types import Group

SOURCE = """
import statistics
import turnwise
from turnwise.rewards.credit.credit import ValueEstimates

CALLS = []

def centred(batch, *, power: float = 1.0, words: list[str] = ()):
    def of(group):
        mean = statistics.fmean(episode.reward for episode in group)
        return [[(episode.reward - mean) * power] * episode.turns for episode in group]
    return [of(group) for group in batch]

def by_token(batch):
    return [[[[0.5] * count for count in episode.tokens_T] for episode in group] for group in batch]

@turnwise.needs(critic="turn")
def with_critic(batch):
    def of(episode):
        return [reward - value for reward, value in zip(episode.received, episode.values_T)]
    return ValueEstimates(
        [[of(episode) for episode in group] for group in batch],
        [[episode.received for episode in group] for group in batch],
    )

@turnwise.needs(critic="token")
def forgets_returns(batch):
    return by_token(batch)

@turnwise.needs(baseline=True)
def greedy(batch):
    return [[[episode.reward - episode.baseline] * episode.turns for episode in group] for group in batch]

def undeclared(batch):
    return ValueEstimates(by_token(batch), by_token(batch))

def none(batch): pass
def one_each(batch): return [[episode.reward for episode in group] for group in batch]
def too_few(batch): return [[[0.0] * episode.turns for episode in group[1:]] for group in batch]
def one_turn(batch): return [[[0.0] for episode in group] for group in batch]
def tokens_of_none(batch): return [[[[0.0]] * episode.turns for episode in group] for group in batch]
def nan(batch): return [[[float("nan")] * episode.turns for episode in group] for group in batch]
def text(batch): return [[["1"] * episode.turns for episode in group] for group in batch]
def raises(batch): return batch[0][0].nothing
def needs_more(batch, *, power: float): return centred(batch, power=power)
def no_parameter(): return []
async def waits(batch): return []
class Kind: pass
number = 3

def of_the_order(batch): return [[[float(n)] * episode.turns for n, episode in enumerate(group)] for group in batch]
def of_the_groups(batch): return [[[float(n)] * episode.turns for episode in group] for n, group in enumerate(batch)]
def of_earlier_calls(batch):
    CALLS.append(1)
    return [[[float(len(CALLS))] * episode.turns for episode in group] for group in batch]
def writes(batch):
    found = centred(batch)
    for group in batch:
        for episode in group:
            episode.rewards_T[0] = 0.0
    return found
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(dedent(SOURCE), encoding="utf-8")
    return str(path)


def recipe(credit: Any, **more: Any) -> Config:
    return checked({"model": "m", "data": {"train": "r.jsonl"}, "credit": credit, **more}, source="the test")


def credited(credit: Any, groups: list[Group]) -> list[Any]:
    config = recipe(credit)
    assembly.credit(config, assembly.scorer(config))(groups)
    return [one.advantages for group in groups for one in group.trajectories]


def test_a_reference_is_short_for_a_section_with_a_function(file: str, tmp_path: Path) -> None:
    use = f"{file}:centred"
    short, long = recipe(use), recipe({"name": "own", "use": use})
    assert short == long == recipe({"use": use})
    assert short.credit == OwnCredit(use=use)
    assert recipe(short.model_dump()["credit"]) == short  # config.yaml of a run is a recipe
    assert Recipe(model="m", rows="r.jsonl", credit=use).config.credit == short.credit
    given = Recipe(model="m", rows="r.jsonl", credit=credit_of).config.credit
    assert given == OwnCredit(use="turnwise.rewards.credit:credit_of")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: m\ndata: {{train: r.jsonl}}\ncredit: {{use: '{use}', arguments: {{power: 3}}}}\n", encoding="utf-8"
    )
    assert load(path)[0].credit == OwnCredit(use=use, arguments={"power": 3})
    assert load(path, ["credit.arguments.power=4"])[0].credit == OwnCredit(use=use, arguments={"power": 4})
    other, notes = load(path, [f"credit={file}:by_token"])
    assert other.credit == OwnCredit(use=f"{file}:by_token")
    assert ["credit.arguments" in note for note in notes] == [True]
    ours, notes = load(path, ["credit=rloo"])
    assert ours.credit == Rloo()
    assert notes == ["credit=rloo removes the recipe's credit.use, credit.arguments, which belonged to 'own'"]
    path.write_text("model: m\ndata: {train: r.jsonl}\ncredit: {name: gigpo, omega: 2}\n", encoding="utf-8")
    config, notes = load(path, [f"credit={use}", "credit.arguments={power: 2}"])
    assert config.credit == OwnCredit(use=use, arguments={"power": 2})
    assert ["credit.omega" in note for note in notes] == [True]
    path.write_text(f"model: m\ndata: {{train: r.jsonl}}\ncredit: {use}\n", encoding="utf-8")
    assert load(path, ["credit.arguments.power=4"])[0].credit == OwnCredit(use=use, arguments={"power": 4})


def test_the_advantages_are_those_that_the_function_returns(file: str) -> None:
    first, second = batch(1), batch(1)
    assert credited("shared", first) != credited({"use": f"{file}:centred", "arguments": {"power": 2}}, second)
    for group in second:
        mean = sum(one.reward or 0.0 for one in group.trajectories) / len(group.trajectories)
        for one in group.trajectories:
            assert one.advantages == pytest.approx([2 * ((one.reward or 0.0) - mean)] * len(one.turns))
    by_token = credited(f"{file}:by_token", batch(1))
    counts = [
        [one.segments[0].turn.count(n) for n in range(len(one.turns))] for g in batch(1) for one in g.trajectories
    ]
    assert by_token == [[[0.5] * count for count in of_one] for of_one in counts]


def test_groups_without_a_reward_are_not_shown_to_the_function(file: str) -> None:
    groups = batch(2, groups=3)
    for one in groups[1].trajectories:
        one.reward = None
    found = credited(f"{file}:centred", groups)  # fmean of nothing would raise
    assert [bool(entry) for entry in found] == [True] * 4 + [False] * 4 + [True] * 4
    assert own([[]], OwnCredit(use=f"{file}:centred")) == [[]]


def test_a_function_says_that_it_needs_a_critic_or_a_greedy_conversation(file: str) -> None:
    plain, critic, greedy = (recipe(f"{file}:{name}") for name in ("centred", "with_critic", "greedy"))
    assert [needs_critic(one) for one in (plain, critic, greedy)] == [False, True, False]
    assert chosen_estimator(critic).needs_values == "turn"
    made = [assembly.credit(one, assembly.scorer(one)) for one in (plain, critic, greedy)]
    assert [(one.needs_values, one.needs_baseline) for one in made] == [(None, False), ("turn", False), (None, True)]
    groups = batch(3)
    made[1](groups)
    one = groups[0].trajectories[0]
    rewards = [turn.reward for turn in one.turns]
    rewards[-1] += (one.reward or 0.0) - sum(rewards)
    firsts = [values[0] if values else 0.0 for values in one.values]  # type: ignore[index, union-attr]
    assert one.returns == pytest.approx(rewards)
    assert one.advantages == pytest.approx([reward - value for reward, value in zip(rewards, firsts, strict=True)])
    made[2](groups)
    greedy_reward = groups[0].baseline.reward or 0.0  # type: ignore[union-attr]
    assert one.advantages == pytest.approx([(one.reward or 0.0) - greedy_reward] * len(one.turns))
    refuse_without_effect(recipe(f"{file}:with_critic", critic={"lr": 1e-4}))
    with pytest.raises(ConfigError, match=r"critic\.lr has no effect .*@turnwise\.needs\(critic='turn'\)"):
        refuse_without_effect(recipe(f"{file}:centred", critic={"lr": 1e-4}))


def test_one_conversation_for_each_row_is_enough_for_a_function(file: str) -> None:
    refuse_without_effect(recipe(f"{file}:by_token", train={"group_size": 1}))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "centred",
            {"pwer": 2},
            r"mine.py:centred\(batch, \*, power: float = 1.0.* has no argument 'pwer' for a recipe; did you mean 'power'",
        ),
        ("centred", {"batch": []}, r"has no argument 'batch' for a recipe"),
        (
            "centred",
            {"power": "two"},
            r"credit\.arguments\.power='two' is not .* takes: input should be a valid number",
        ),
        (
            "centred",
            {"words": [1]},
            r"credit\.arguments\.words=\[1\] is not what .* takes: input should be a valid string",
        ),
        ("needs_more", {}, r"needs_more\(batch, \*, power: float\) needs power: add them to the recipe"),
        ("no_parameter", {}, r"no_parameter\(\) must take 1 positional argument \(batch\)"),
        ("waits", {}, "waits is async"),
        ("Kind", {}, "Kind is a class; it must be a function"),
        ("number", {}, "number is a int; it must be a function"),
        ("centrd", {}, "has no 'centrd'; did you mean 'centred'"),
        (
            "none",
            {},
            r"none returned None in place of .* each group of the batch \(4\): is a `return` missing",
        ),
        (
            "one_each",
            {},
            r"returned 1\.7 in place of .* each turn of conversation 0 of group 0 .*; .* \[advantage\] \* episode\.turns",
        ),
        (
            "too_few",
            {},
            r"too_few returned 2 entries for group 0, .* each conversation of group 0 \(3\)",
        ),
        ("one_turn", {}, r"one_turn returned 1 entries for conversation 0 of group 0"),
        (
            "tokens_of_none",
            {},
            r"1 entries for turn 0 of conversation 0 of group 0, .* each sampled token of turn 0 of .* \(3\)",
        ),
        ("nan", {}, "nan gave nan for turn 0 of conversation 0 of group 0; an advantage must be a finite number"),
        ("text", {}, "turn 0 of conversation 0 of group 0: .* gave the text '1'; an advantage must be a number"),
        (
            "raises",
            {},
            r"raises raised AttributeError: 'Episode' object has no attribute 'nothing'(.|\n)*line \d+, in raises",
        ),
        (
            "undeclared",
            {},
            r"undeclared returned ValueEstimates, and declares no critic: write @needs\(critic='turn'\)",
        ),
        ("forgets_returns", {}, r"forgets_returns returned list, and declares a critic \(@needs\)"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_the_first_step(
    file: str, name: str, arguments: dict[str, Any], message: str
) -> None:
    config = recipe({"use": f"{file}:{name}", "arguments": arguments})
    with pytest.raises(ConfigError, match=message):
        assembly.credit(config, assembly.scorer(config))


def test_what_goes_wrong_in_a_step_ends_the_run_with_its_place(file: str) -> None:
    path = Path(file)
    path.write_text(
        "def late(batch):\n    return [[[1.0 if e.reward < 50 else None] * e.turns for e in g] for g in batch]\n",
        encoding="utf-8",
    )
    config = recipe(f"{file}:late")
    credit = assembly.credit(config, assembly.scorer(config))
    groups = batch(1)
    groups[1].trajectories[2].reward = 60.0
    with pytest.raises(ConfigError, match=r"turn 0 of conversation 2 of group 1: .*late gave None"):
        credit(groups)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("of_the_order", "the order of the conversations in a group changes their advantages"),
        ("of_the_groups", "the order of the groups changes their advantages"),
        ("of_earlier_calls", "a second call with the same batch gives other advantages"),
        ("writes", "it changes the rewards of the conversations that it is given"),
    ],
)
def test_the_doctor_names_the_invariant_that_a_function_breaks(file: str, name: str, broken: str) -> None:
    check = own_estimator(recipe(f"{file}:{name}"))
    assert check.status == "fail"
    assert f"{name}: " in check.text
    assert broken in check.text


@pytest.mark.parametrize("name", ["centred", "by_token", "with_critic", "greedy"])
def test_the_doctor_finds_nothing_in_a_function_that_keeps_them(file: str, name: str) -> None:
    check = own_estimator(recipe(f"{file}:{name}"))
    assert (check.name, check.status) == ("estimator", "ok")


def test_another_function_or_argument_is_a_change_when_a_run_is_resumed(file: str) -> None:
    values = option_values(recipe({"use": f"{file}:centred", "arguments": {"power": 2.0}}))
    assert (values["credit.use"], values["credit.arguments"]) == (f"{file}:centred", {"power": 2.0})
    assert RULES["credit.use"] == RULES["credit.arguments"] == "named"
