"""Reasoning Gym through the loop: the data sets' own entries and scores, and answers that its scorers would execute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.own_environment import needs
from turnwise import assembly
from turnwise.compat.providers.reasoning_gym import _EVALUATES, ReasoningGym
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

pytestmark = [
    needs("reasoning_gym"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning"),
]

LIMITS = Limits(turns=8, tokens_per_turn=4000)
TEN = ("basic_arithmetic", "chain_sum", "countdown", "family_relationships", "gcd", "leg_counting", "n_queens", "spell_backward",
       "syllogism", "word_ladder")  # fmt: skip


def recipe(name: str, **arguments: Any) -> Config:
    use = {"use": f"reasoning_gym:{name}", "arguments": arguments}
    return checked({"model": "m", "environment": use}, source="recipe")


def played(config: Config, row: Row, *answers: str) -> Trajectory:
    trajectory = hold(Says(*answers), assembly.environment_factory(config), row=row, limits=LIMITS)
    assert trajectory.error is None, trajectory.error
    return trajectory


@pytest.mark.parametrize("name", TEN)
def test_an_entry_and_its_rewards_are_those_of_the_library(name: str) -> None:
    import reasoning_gym

    config = recipe(name, seed=5)
    row = assembly.rows(config, limit=4)[3]
    own = reasoning_gym.create_dataset(name, seed=5, size=500)
    entry = own[3]
    for answer in (entry["answer"], "nothing"):
        trajectory = played(config, row, f"Hm. <answer>{answer}</answer>")
        (turn,) = trajectory.turns
        assert turn.reward == own.score_answer(answer=answer, entry=entry)
        assert trajectory.messages[0]["content"].startswith(entry["question"])
        assert turn.info["answer"] == answer


def test_wrong_answers_are_told_and_the_last_one_counts() -> None:
    import reasoning_gym

    config = recipe("gcd", tries=3, retry_factor=0.5)
    (row,) = assembly.rows(config, limit=1)
    right = reasoning_gym.create_dataset("gcd", seed=0, size=1)[0]["answer"]
    trajectory = played(config, row, "no tags", "<answer>-1</answer>", f"<answer>{right}</answer>")
    assert [turn.reward for turn in trajectory.turns] == [0, 0, 0.25]
    users = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert users[1:] == [
        "There is no answer between <answer> and </answer> in your message. Try again.",
        "Your answer is wrong. Try again.",
    ]


def test_the_levels_of_a_curriculum_go_by_the_rows_and_composite_sets_mix() -> None:
    config = recipe("chain_sum", level=[0, 3])
    rows = assembly.rows(config, limit=4)
    assert [row["level"] for row in rows] == [0, 3, 0, 3]
    lengths = [len(played(config, row, "x").messages[0]["content"]) for row in rows]
    assert max(lengths[0], lengths[2]) < min(lengths[1], lengths[3])
    mixed = recipe("composite", config={"datasets": [{"name": "gcd"}, {"name": "leg_counting", "weight": 2}]})
    shown = [played(mixed, row, "x").messages[0]["content"] for row in assembly.rows(mixed, limit=8)]
    assert 0 < sum("Greatest Common Divisor" in text for text in shown) < 8


def test_a_curriculum_is_refused_with_endless_rows_and_has_an_effect_on_a_file_of_seeds(tmp_path: Path) -> None:
    file = tmp_path / "seeds.jsonl"
    file.write_text('{"seed": 0, "level": 1}\n{"seed": 1, "level": 0}\n')
    use = {"use": "reasoning_gym:gcd", "arguments": {"level": [0, 1]}}
    tree: dict[str, Any] = {"model": "m", "environment": use, "data": {"curriculum": {"high": 1.0}}}
    with pytest.raises(ConfigError, match=r"data.curriculum has no effect on the rows that .* makes by seed"):
        assembly.rows(checked(tree, source="recipe"))
    tree["data"]["train"] = str(file)
    rows = assembly.rows(checked(tree, source="recipe"))
    assert [(row.id, row.in_pass(1).id) for row in rows] == [("1", "1"), ("2", "2")]


@pytest.mark.parametrize("name", ["countdown", "n_queens", "polynomial_multiplication", "string_insertion"])
@pytest.mark.parametrize("attack", ["__import__('pathlib').Path({path!r}).touch()", "9**9**9**9", "[9]*10**10"])
def test_an_answer_that_the_scorer_would_execute_is_not_given_to_it(tmp_path: Path, name: str, attack: str) -> None:
    path = tmp_path / "executed"
    config = recipe(name)
    (row,) = assembly.rows(config, limit=1)
    trajectory = played(config, row, f"<answer>{attack.replace('{path!r}', repr(str(path)))}</answer>")
    assert not path.exists()
    assert trajectory.turns[0].reward <= 0.01
    assert "not_evaluated" in trajectory.turns[0].info


ATTACKS = {
    "string_insertion": [
        "{0 for StringInsertionDataset.score_answer in {lambda self, answer, entry: 1.0}}",
        'f"{1:>9999999999}"',
        '"%9999999999d" % 1',
        "oracle_answer",
    ],
    "spiral_matrix": ["[x for x in (1, 2)]", "{**self}", "entry", "[answer]"],
    "countdown": ["exp(3)", "factorial(9)", "binomial(99, 9)", "Lambda", "1e999", "9**9**9", "'9'*9", "9!", "x"],
    "puzzle24": ["gamma(99999999)", "fibonacci(99999999)", "(lambda: 24)()", "1e-99999999", "24 # \\"],
    "polynomial_multiplication": ["Sum(x, (x, 1, 10**9))", "sin(x)", "x_0", "(9**9)**(9**9)", "S.One", "２*x"],
    "simple_integration": [
        "exp(exp(exp(exp(3))))",
        "exp(exp(exp(exp(3 + 0*x))))",
        "cosh(cosh(cosh(9)))",
        "E**E**E**E**9",
        "Pow(x, 9)",
        "(a + b + c + d + x)**64",
        "+".join(f"1/(x+{n})" for n in range(99)),
        "Integral(x**2, x)",
    ],
    "coin_flip": ["1e999999999", "1E-9_99_999"],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_syntax_names_and_sizes_that_are_not_known_to_be_harmless_are_refused(name: str) -> None:
    source = ReasoningGym(name)
    dataset, entry = source.entry(assembly.rows(recipe(name), limit=1)[0])
    for attack in ATTACKS[name]:
        score, refused = source.score(dataset, entry, attack)
        assert score <= 0.01, attack
        assert refused is not None, attack
    if name == "string_insertion":
        assert dataset.score_answer("no list", entry) == 0.0, "the class of the library is as it was"


@pytest.mark.parametrize("name", sorted(_EVALUATES))
def test_right_answers_of_guarded_data_sets_are_given_to_the_scorer(name: str) -> None:
    source = ReasoningGym(name)
    texts = {row.id: source.entry(row)[1]["answer"] for row in assembly.rows(recipe(name), limit=5)}
    # sympy leaves some integrals as they are
    answers = [text for text in texts.values() if text is not None and "Integral(" not in text]
    assert answers
    assert [_EVALUATES[name](answer) for answer in answers] == [None] * len(answers)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("string_insertion", "['A', 'B']"),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"),
        ("spiral_matrix", "[1, -2, 3]"),
        ("countdown", "(50 - 3)*2/4 + 7"),
        ("simple_integration", "exp(0.5*x)*sin(3*x) + E**(x**2) - (2*x + 1)**(3/2)/3 + log(x**2 + 1) + C"),
        ("polynomial_multiplication", "12*x**2*y - 3*z**10"),
    ],
)
def test_usual_answers_are_not_refused(name: str, answer: str) -> None:
    assert _EVALUATES[name](answer) is None


def test_the_guard_of_one_inner_data_set_of_a_composite_is_not_applied_to_another() -> None:
    sets = [{"name": "countdown"}, {"name": "spell_backward"}, {"name": "simple_integration"}]
    source = ReasoningGym("composite", config={"datasets": sets})
    seen: set[str] = set()
    for row in assembly.rows(recipe("composite", config={"datasets": sets}), limit=12):
        dataset, entry = source.entry(row)
        seen.add(inner := entry["metadata"]["source_dataset"])
        if inner == "spell_backward":
            assert source.score(dataset, entry, entry["answer"]) == (1.0, None)
        else:
            assert source.score(dataset, entry, "__import__('os')")[1] is not None
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("countdwn", {}, "did you mean 'countdown'"),
        ("countdown", {"config": {"max_number": 3}}, "max_number"),
        ("countdown", {"config": {"seed": 3}}, r"config.seed: remove it"),
        ("countdown", {"tries": 0}, "tries is 0; it must be an integer of at least 1"),
        ("countdown", {"retry_factor": 0.5}, "retry_factor has no effect with tries=1"),
        ("countdown", {"level": {"number": 1}}, "no attribute 'number'; did you mean 'numbers'"),
        ("composite", {"config": {"datasets": []}}, "composite cannot be created"),
    ],
)
def test_wrong_arguments_are_refused_before_the_run(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(recipe(name, **arguments))
