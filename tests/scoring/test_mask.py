"""Loss masks: which turns each rule keeps, and that the gradient is that of a plain loop over the tokens that it keeps."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from support.tiny import save_model, save_rows, tiny_model
from training.test_batch import gradients, targets, trajectory
from turnwise import build
from turnwise.collect import collect
from turnwise.config import LOSS_MASKS, Config, refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.recipe import load
from turnwise.report import Report
from turnwise.scoring.mask import RULES, Rule, custom
from turnwise.train import assemble, train
from turnwise.training.batch import pack
from turnwise.training.policy import Optimization, Policy
from turnwise.types import Row, Sampling, Stop, Trajectory, Turn

SUPPORT = Path(__file__).parents[1] / "support"


def said(*roles: str, turns: int | None = None, cut: tuple[int, ...] = ()) -> Trajectory:
    """A conversation of these roles; `turns` are those of the model, all assistant messages unless there are fewer."""
    one = Trajectory(id="x", group="x", row=Row(id="x", messages=[]))
    one.messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    count = roles.count("assistant") if turns is None else turns
    one.turns = [Turn(index=n, message={}, text=str(n), cut=1 if n in cut else None) for n in range(count)]
    return one


def kept(rule: Rule, one: Trajectory) -> list[float]:
    rule(one)
    return [turn.weight for turn in one.turns]


TWO_QUESTIONS = ("system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("all", [1, 1, 1, 1]),
        ("last_turn", [0, 0, 0, 1]),
        ("after_last_user", [0, 0, 1, 1]),
        ("last_round", [0, 0, 0, 1]),
    ],
)
def test_each_rule_keeps_its_turns_of_a_conversation_with_two_questions_and_tools(
    name: str, weights: list[int]
) -> None:
    assert kept(RULES[name], said(*TWO_QUESTIONS)) == weights


def test_a_rule_says_the_same_when_it_is_asked_again_and_undoes_another() -> None:
    one = said(*TWO_QUESTIONS)
    assert kept(RULES["last_turn"], one) == kept(RULES["last_turn"], one)
    assert kept(RULES["all"], one) == [1, 1, 1, 1]
    assert kept(RULES["last_turn"], said("user", turns=0)) == []


def test_a_last_message_that_nobody_answered_begins_no_round() -> None:
    one = said("user", "assistant", "user", "assistant", "tool", "assistant", "user")
    assert kept(RULES["after_last_user"], one) == [0, 1, 1]
    assert kept(RULES["last_round"], said("user", "assistant", "tool", "assistant", "tool", "tool")) == [0, 1]


def test_two_answers_in_a_row_are_one_round_and_two_turns() -> None:
    one = said("user", "assistant", "user", "assistant", "assistant")
    assert kept(RULES["last_round"], one) == kept(RULES["after_last_user"], one) == [0, 1, 1]
    assert kept(RULES["last_turn"], one) == [0, 0, 1]


def test_answers_in_the_opening_are_no_turns() -> None:
    few_shot = ("user", "assistant", "user", "assistant", "user", "assistant")
    assert kept(RULES["after_last_user"], said(*few_shot, turns=1)) == [1]
    assert kept(RULES["after_last_user"], said(*few_shot, turns=2)) == [0, 1]
    assert kept(RULES["after_last_user"], said("assistant", "assistant", turns=1)) == [1]


def test_turns_that_a_rewritten_history_left_out_are_before_it() -> None:
    one = said("user", "assistant", "tool", "assistant", turns=5)
    one.former = [[{"role": "user", "content": "as it was"}]]
    assert kept(RULES["after_last_user"], one) == [0, 0, 0, 1, 1]


def test_an_answer_that_was_cut_and_continued_is_one() -> None:
    # turns 2, 3 and 4 are a single message
    one = said("user", "assistant", "user", "assistant", "tool", "assistant", turns=5, cut=(2, 3))
    assert kept(RULES["last_turn"], one) == [0, 0, 1, 1, 1]
    assert kept(RULES["after_last_user"], one) == [0, 1, 1, 1, 1]
    assert kept(RULES["last_turn"], said("user", "assistant", turns=1, cut=(0,))) == [1]


# a function of one's own


def halves(turn: Turn) -> float:
    return 1 / (turn.index + 1)


def last_only(turn: Turn, trajectory: Trajectory) -> bool:
    return turn is trajectory.turns[-1]


def with_default(turn: Turn, trajectory: Trajectory | None = None) -> int:
    return len(trajectory.turns) if trajectory is not None else 0


def test_a_function_gives_the_weight_of_each_turn_and_may_take_the_trajectory() -> None:
    one = said(*TWO_QUESTIONS)
    assert kept(custom(halves, name="halves"), one) == [1, 1 / 2, 1 / 3, 1 / 4]
    assert kept(custom(last_only, name="last_only"), one) == [0, 0, 0, 1]
    assert kept(custom(with_default, name="with_default"), one) == [4, 4, 4, 4]
    assert kept(custom(lambda turn, scale=2: torch.tensor([scale]), name="tensor"), one) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda turn: -1.0, "the loss mask 'mine' gave -1.0 for turn 0; a weight must be a finite number, 0 or more"),
        (lambda turn: float("nan"), "gave nan for turn 0;"),
        (lambda turn: float("inf") if turn.index == 2 else 1, "gave inf for turn 2;"),
        (lambda turn: None, "gave None for turn 0;"),
        (lambda turn: "1", "gave '1' for turn 0;"),
        (lambda turn: [1.0, 2.0], "TypeError: float() argument must be"),
        (lambda turn: turn.info["weight"], "KeyError: weight"),
    ],
)
def test_a_function_that_breaks_or_gives_no_weight_breaks_its_conversation_only(function: Any, message: str) -> None:
    broken, other = said(*TWO_QUESTIONS), said(*TWO_QUESTIONS)
    rule = custom(lambda turn, trajectory: function(turn) if trajectory is broken else 0.5, name="mine")
    rule(broken)
    rule(other)
    assert broken.error is not None
    assert (broken.error.kind, broken.stop, broken.reward) == ("loss_mask", Stop.ERROR, None)
    assert message in broken.error.message
    assert [turn.weight for turn in broken.turns] == [1, 1, 1, 1]
    assert [turn.weight for turn in other.turns] == [0.5] * 4
    before = broken.error
    rule(broken)  # what is broken is not asked about
    assert broken.error is before


# recipes


MINE = """
def weight(turn, scale: float):
    return scale * turn.index

def of_both(turn, trajectory):
    return len(trajectory.turns)

async def waits(turn):
    return 1

def of_three(turn, trajectory, further):
    return 1
"""


def recipe(path: Path, *overrides: str) -> Config:
    (path / "mine.py").write_text(MINE)
    (path / "recipe.yaml").write_text("model: {path: m}\ndata: {train: rows.jsonl}\n")
    return load(path / "recipe.yaml", [one.replace("mine.py", f"{path}/mine.py") for one in overrides])[0]


def test_a_recipe_names_a_rule_or_a_function(tmp_path: Path) -> None:
    assert tuple(RULES) == LOSS_MASKS
    one = said(*TWO_QUESTIONS)
    assert build.loss_mask(recipe(tmp_path)) is RULES["all"]
    assert build.loss_mask(recipe(tmp_path, "loss_mask=last_round")) is RULES["last_round"]
    scaled = build.loss_mask(recipe(tmp_path, "loss_mask=mine.py:weight", "loss_mask.arguments.scale=0.5"))
    assert kept(scaled, one) == [0, 0.5, 1, 1.5]
    assert kept(build.loss_mask(recipe(tmp_path, "loss_mask={use: mine.py:of_both}")), one) == [4] * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "loss_mask=last_trun",
            "loss_mask: there is no rule of this name; there are all, last_turn, after_last_user, last_",
        ),
        ("loss_mask=last_trun", "did you mean 'last_turn'?; got 'last_trun'"),
        ("loss_mask={use: last_turn, arguments: {n: 2}}", "loss_mask: the rule last_turn takes no arguments"),
        ("loss_mask=mine.py:weigth", "mine.py has no 'weigth'; did you mean 'weight'?"),
        ("loss_mask=mine.py:weight", "cannot be called with the arguments {}: missing a required"),
        (
            "loss_mask={use: mine.py:of_both, arguments: {n: 2}}",
            "cannot be called with the arguments {'n': 2}: got an un",
        ),
        (
            "loss_mask=mine.py:of_three",
            "cannot be called with the arguments {}: missing a required argument: 'further'",
        ),
        ("loss_mask=mine.py:waits", "is async; a loss mask waits for nothing: write def instead of async def"),
    ],
)
def test_what_is_no_loss_mask_is_told(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build.loss_mask(recipe(tmp_path, override))
    assert message in str(error.value)


def test_a_rule_among_one_turn_is_refused_and_a_function_is_not(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_mask=last_turn has no effect with limits\.turns=1, .*raise limits\.turns"
    ):
        refuse_without_effect(recipe(tmp_path, "loss_mask=last_turn", "limits.turns=1"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=all", "limits.turns=1"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=last_turn"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=mine.py:of_both", "limits.turns=1"))


# runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


BREAKS = """
def first_rows(turn, trajectory):
    return 0.5 if int(trajectory.row.id) <= 4 else -1
"""


def options(model: Path, path: Path, **further: Any) -> Config:
    (path / "breaks.py").write_text(BREAKS)
    tree = {
        "model": {"path": str(model)},
        "data": {"train": str(save_rows(path / "train.jsonl"))},
        "environment": f"{SUPPORT / 'places.py'}:low_bytes",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 1, "rows": 4, "group": 4, "lr": 0.01},
        "output": str(path / "run"),
    }
    return Config.model_validate({**tree, **further})


def held(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "trajectories.jsonl").read_text().splitlines()]


def learn(config: Config) -> dict[str, Any]:
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(assemble(config), Report(Console(file=nowhere))))
    return json.loads((Path(config.output) / "metrics.jsonl").read_text())


def test_a_run_trains_on_the_turns_of_the_mask_only_and_records_the_weights(model: Path, tmp_path: Path) -> None:
    metrics = learn(options(model, tmp_path, loss_mask="last_turn", sampling={"temperature": 1.5}))
    trajectories = held(tmp_path / "run")
    assert {len(one["turns"]) for one in trajectories} >= {2}
    assert all(
        [turn["weight"] for turn in one["turns"]] == [0.0] * (len(one["turns"]) - 1) + [1.0] for one in trajectories
    )
    last = {(one["group"], str(one["segments"]), one["turns"][-1]["advantage"]): one for one in trajectories}
    counted = sum(segment["turn"].count(len(one["turns"]) - 1) for one in last.values() for segment in one["segments"])
    assert 0 < metrics["tokens/trained"] <= counted < metrics["tokens/sampled"]
    assert metrics["grad_norm"] > 0


def test_a_function_that_breaks_costs_its_conversations_and_not_the_run(model: Path, tmp_path: Path) -> None:
    config = options(
        model, tmp_path, loss_mask=f"{tmp_path}/breaks.py:first_rows", train={"steps": 1, "rows": 8, "group": 2}
    )
    metrics = learn(config)
    assert metrics["failed"] == 0.5
    for one in held(tmp_path / "run"):
        if int(one["row"]["id"]) <= 4:
            assert {turn["weight"] for turn in one["turns"]} == {0.5}
            assert one["turns"][0]["advantage"] is not None
        else:
            assert one["error"]["kind"] == "loss_mask"
            assert "'first_rows' gave -1 for turn 0" in one["error"]["message"]
            assert one["turns"][0]["advantage"] is None


def test_a_mask_that_leaves_nothing_is_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "none.py").write_text("def none(turn): return 0")
    with caplog.at_level(logging.WARNING):
        metrics = learn(options(model, tmp_path, loss_mask=f"{tmp_path}/none.py:none"))
    assert f"step 1: loss_mask={tmp_path}/none.py:none gives all turns the weight 0, so there is nothing" in caplog.text
    assert (metrics["tokens/trained"], metrics["loss"]) == (0, 0.0)


def test_a_rollout_records_the_weights_too(model: Path, tmp_path: Path) -> None:
    asyncio.run(collect(options(model, tmp_path, loss_mask="last_round"), tmp_path / "out", Console(quiet=True)))
    for one in held(tmp_path / "out"):
        assert [turn["weight"] for turn in one["turns"]] == [0.0] * (len(one["turns"]) - 1) + [1.0]


def test_the_view_in_the_documentation_is_what_the_rules_give() -> None:
    script = Path(__file__).parents[2] / "scripts" / "mask_view.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


# the loss


def conversations() -> list[Trajectory]:
    """A group and one more: two questions with a tool, a rewritten history, an answer that was cut, a single turn."""
    opening = ("context", [5, 6, 7])
    tools = trajectory(
        "a",
        [
            opening,
            ("turn", [8, 9, 2]),
            ("context", [10, 11]),
            ("turn", [12, 2]),
            ("context", [13]),
            ("turn", [14, 15, 2]),
        ],
        [1.0, -0.5, 0.75],
    )
    tools.messages = said("user", "assistant", "tool", "assistant", "user", "assistant").messages
    rewritten = trajectory(
        "b",
        [
            opening,
            ("turn", [20, 2]),
            ("new segment", []),
            ("context", [5, 21]),
            ("turn", [22, 23, 2]),
            ("context", [24]),
        ],
        [-1.0, -1.0],
    )
    rewritten.messages = said("user", "assistant").messages
    cut = trajectory("c", [opening, ("turn", [30, 31, 32, 2])], [0.5])
    cut.segments[0].cut(5)  # of four sampled tokens two stay
    cut.turns[0].cut = 2
    cut.segments[0].context([33])
    cut.segments[0].sampled(1, completion_of([34, 2]))
    cut.turns.append(Turn(index=1, message={}, text="", completion=completion_of([34, 2])))
    cut.advantages, cut.messages = [0.5, 0.5], said("user", "assistant").messages
    single = trajectory("d", [("context", [40]), ("turn", [41, 2])], [2.0], group="h")
    single.messages = said("user", "assistant").messages
    return [tools, rewritten, cut, single]


def completion_of(ids: list[int]) -> Any:
    return trajectory("", [("turn", ids)], [0.0]).turns[0].completion


def plain(trajectories: list[Trajectory], average: str) -> torch.Tensor:
    """The gradient of the weighted log-likelihood, one token after the other."""
    model = tiny_model()
    terms: list[list[tuple[float, float, torch.Tensor]]] = []
    for one in trajectories:
        terms.append([])
        for segment in one.segments:
            logprob_TV = model(torch.tensor([list(segment.token_ids)])).logits[0].log_softmax(-1)
            for place, turn in enumerate(segment.turn):
                if turn >= 0:
                    term = logprob_TV[place - 1, segment.token_ids[place]]
                    terms[-1].append((one.turns[turn].weight, one.advantages[turn], term))
    masses = [sum(weight for weight, _, _ in of) for of in terms]
    loss = torch.zeros(())
    for of, mass in zip(terms, masses, strict=True):
        if mass:
            whole = sum(masses) if average == "token" else mass * sum(mass > 0 for mass in masses)
            for weight, advantage, term in of:
                loss = loss + weight / whole * advantage * term
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


CUSTOM = {
    "halves": custom(halves, name="halves"),
    "none of one": custom(lambda turn, trajectory: 0.0 if trajectory.id == "a" else 1.5, name="none of one"),
    "the first": custom(lambda turn: turn.index == 0, name="the first"),
}


@pytest.mark.parametrize("average", ["token", "sequence"])
@pytest.mark.parametrize("name", [*RULES, *CUSTOM])
def test_the_gradient_is_that_of_a_plain_loop_over_the_tokens(name: str, average: Any) -> None:
    trajectories = conversations()
    for one in trajectories:
        {**RULES, **CUSTOM}[name](one)
    expected = plain(trajectories, average)
    assert expected.abs().max() > 1e-3
    for share in (True, False):
        batch = pack(trajectories, average=average, share_prompts=share)
        weights = [weight for _, _, weight in targets(batch)]
        assert sum(weights) == pytest.approx(1.0, abs=1e-5)
        assert batch.tokens == len(weights)
        torch.testing.assert_close(gradients(batch, Sampling())[0], expected, atol=1e-6, rtol=1e-4)


def test_weights_of_one_change_nothing() -> None:
    """Bit for bit: the share of a token is one through the number of tokens, as if there were no weights."""
    trajectories = conversations()
    for one in trajectories:
        RULES["all"](one)
    expected = {"token": torch.tensor([1 / 19] * 19)}
    counts = [8, 5, 4, 2]
    expected["sequence"] = torch.tensor([1 / (4 * count) for count in counts for _ in range(count)])
    for average in ("token", "sequence"):
        batch = pack(trajectories, average=average)  # type: ignore[arg-type]
        found = torch.cat([micro.weight_N for micro in batch.micro_batches])
        assert torch.equal(found.sort().values, expected[average].sort().values)
    assert (batch.tokens, batch.trajectories) == (19, 4)  # two of the 21 that were sampled are no longer there


def test_what_has_no_weight_is_no_target_and_a_tail_without_is_not_computed() -> None:
    trajectories = conversations()[:2]
    for one in trajectories:
        CUSTOM["the first"](one)
    (micro,) = pack(trajectories).micro_batches
    #                                       P  P  P  a  a  a  b   b       the second segment of b is not there at all
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 8, 9, 2, 20, 2]]
    assert micro.target_N.tolist() == [8, 9, 2, 20, 2]
    for one in trajectories:
        RULES["last_turn"](one)
    (micro,) = pack(trajectories).micro_batches
    assert micro.target_N.tolist() == [14, 15, 2, 22, 23, 2]
    assert micro.token_ids_BL.shape == (
        1,
        14 + 5,
    )  # what a said before is context, and of b only what it was rewritten to


def test_a_trajectory_without_weight_counts_nowhere_and_one_without_advantage_counts() -> None:
    one, two, three, _ = conversations()
    for turn in three.turns:
        turn.weight = 0.0
    two.advantages = [0.0, 0.0]
    batch = pack([one, two, three], average="sequence")
    assert (batch.trajectories, batch.tokens) == (2, 13)
    assert sum(weight for _, _, weight in targets(batch)) == pytest.approx(0.5, abs=1e-5)
    assert sum(weight for _, _, weight in targets(pack([one, three], average="sequence"))) == pytest.approx(
        1.0, abs=1e-5
    )
    assert targets(pack([one, two, three])) == targets(pack([one, two]))


def test_only_advantages_of_turns_with_weight_ask_for_a_forward_pass() -> None:
    one = conversations()[0]
    RULES["last_turn"](one)
    one.advantages = [1.0, 1.0, 0.0]
    assert pack([one]).micro_batches == []
    assert pack([one]).tokens == 3
    assert len(targets(pack([one], keep_zero=True))) == 3


def test_nothing_with_weight_is_an_empty_batch_that_can_be_learnt_from() -> None:
    trajectories = conversations()
    for one in trajectories:
        custom(lambda turn: 0, name="none")(one)
    batch = pack(trajectories, keep_zero=True)
    assert (batch.micro_batches, batch.trajectories, batch.tokens) == ([], 0, 0)
    policy = Policy(tiny_model(), sampling=Sampling(), options=Optimization(lr=1e-2))
    update = asyncio.run(policy.learn([batch], lr=1e-2))
    assert (update.tokens, update.loss, update.grad_norm) == (0, 0.0, 0.0)


def test_what_a_group_says_twice_is_one_only_at_the_same_weight() -> None:
    def twice(first: float, second: float) -> list[Trajectory]:
        pieces: list[tuple[str, list[int]]] = [("context", [5]), ("turn", [6, 2]), ("context", [7]), ("turn", [8, 2])]
        pair = [trajectory(name, pieces, [1.0, 1.0]) for name in ("x", "y")]
        pair[0].turns[0].weight, pair[1].turns[0].weight = first, second
        return pair

    same, apart = pack(twice(0.5, 0.5)), pack(twice(0.5, 0.25))
    assert len(targets(same)) == 4
    assert len(targets(apart)) == 8
    for batch in (same, apart):
        assert sum(weight for _, _, weight in targets(batch)) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(gradients(apart, Sampling())[0], plain(twice(0.5, 0.25), "token"), atol=1e-6, rtol=1e-4)


def test_the_divergence_is_averaged_by_the_same_weights() -> None:
    trajectories = conversations()
    for one in trajectories:
        CUSTOM["halves"](one)
    batch = pack(trajectories, keep_zero=True)
    policy = Policy(tiny_model(), sampling=Sampling(), options=Optimization(lr=0.0))
    expected = 0.0
    for micro in batch.micro_batches:
        difference_N = micro.old_logprob_N - policy._forward.logprobs(micro)[0].detach()
        expected += float(((difference_N.exp() - difference_N - 1) * micro.weight_N).sum())
    update = asyncio.run(policy.learn([batch], lr=0.0))
    assert update.kl == pytest.approx(expected, rel=1e-4)
