"""What a turn's weight does to the loss: the gradient is that of a plain loop over the tokens, each with its weight."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import gradients, targets, trajectory
from turnwise.options.algorithm import LossSection
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, custom
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.types import Message, Sampling, Trajectory, Turn


def messages(*roles: str) -> list[Message]:
    return [{"role": role, "content": ""} for role in roles]


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
    tools.messages = messages("user", "assistant", "tool", "assistant", "user", "assistant")
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
    rewritten.messages = messages("user", "assistant")
    cut = trajectory("c", [opening, ("turn", [30, 31, 32, 2])], [0.5])
    cut.segments[0].truncate(5)  # of four sampled tokens two stay
    cut.turns[0].kept_tokens = 2
    cut.segments[0].append_context([33])
    cut.segments[0].append_completion(1, completion_of([34, 2]))
    cut.turns.append(Turn(index=1, message={}, text="", completion=completion_of([34, 2])))
    cut.advantages, cut.messages = [0.5, 0.5], messages("user", "assistant")
    single = trajectory("d", [("context", [40]), ("turn", [41, 2])], [2.0], group="h")
    single.messages = messages("user", "assistant")
    return [tools, rewritten, cut, single]


def completion_of(ids: list[int]) -> Any:
    return trajectory("", [("turn", ids)], [0.0]).turns[0].completion


def plain(trajectories: list[Trajectory], normalizer: str) -> torch.Tensor:
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
            whole = sum(masses) if normalizer == "token" else mass * sum(mass > 0 for mass in masses)
            for weight, advantage, term in of:
                loss = loss + weight / whole * advantage * term
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


CUSTOM = {
    "halves": custom(lambda turn: 1 / (turn.index + 1), name="halves"),
    "none of one": custom(lambda turn, trajectory: 0.0 if trajectory.id == "a" else 1.5, name="none of one"),
    "the first": custom(lambda turn: turn.index == 0, name="the first"),
}


@pytest.mark.parametrize("normalizer", ["token", "trajectory"])
@pytest.mark.parametrize("name", [*TURN_WEIGHTINGS, *CUSTOM])
def test_the_gradient_is_that_of_a_plain_loop_over_the_tokens(name: str, normalizer: Any) -> None:
    trajectories = conversations()
    for one in trajectories:
        {**TURN_WEIGHTINGS, **CUSTOM}[name](one)
    expected = plain(trajectories, normalizer)
    assert expected.abs().max() > 1e-3
    for share in (True, False):
        batch = pack(trajectories, loss=LossSection(normalizer=normalizer), share_prompts=share)
        weights = [weight for _, _, weight in targets(batch)]
        assert sum(weights) == pytest.approx(1.0, abs=1e-5)
        assert batch.tokens == len(weights)
        torch.testing.assert_close(gradients(batch, Sampling())[0], expected, atol=1e-6, rtol=1e-4)


def test_weights_of_one_change_nothing() -> None:
    """Bit for bit: the share of a token is one through the number of tokens, as if there were no weights."""
    trajectories = conversations()
    for one in trajectories:
        TURN_WEIGHTINGS["all"](one)
    expected = {"token": torch.tensor([1 / 19] * 19)}
    counts = [8, 5, 4, 2]
    expected["trajectory"] = torch.tensor([1 / (4 * count) for count in counts for _ in range(count)])
    for normalizer in ("token", "trajectory"):
        batch = pack(trajectories, loss=LossSection(normalizer=normalizer))
        found = torch.cat([micro.targets.weight_N for micro in batch.micro_batches])
        assert torch.equal(found.sort().values, expected[normalizer].sort().values)
    assert (batch.tokens, batch.trajectories) == (19, 4)  # two of the 21 that were sampled are no longer there


def test_what_has_no_weight_is_no_target_and_a_tail_without_is_not_computed() -> None:
    trajectories = conversations()[:2]
    for one in trajectories:
        CUSTOM["the first"](one)
    (micro,) = pack(trajectories).micro_batches
    #                                       P  P  P  a  a  a  b   b       the second segment of b is not there at all
    assert micro.token_ids_BL.tolist() == [[5, 6, 7, 8, 9, 2, 20, 2]]
    assert micro.targets.token_N.tolist() == [8, 9, 2, 20, 2]
    for one in trajectories:
        TURN_WEIGHTINGS["last_turn"](one)
    (micro,) = pack(trajectories).micro_batches
    assert micro.targets.token_N.tolist() == [14, 15, 2, 22, 23, 2]
    # what a said before is context, and of b only what it was rewritten to, which begins with the same token
    assert micro.token_ids_BL.shape == (1, 14 + 5 - 1)


def test_a_trajectory_without_weight_counts_nowhere_and_one_without_advantage_counts() -> None:
    one, two, three, _ = conversations()
    for turn in three.turns:
        turn.weight = 0.0
    two.advantages = [0.0, 0.0]
    batch = pack([one, two, three], loss=LossSection(normalizer="trajectory"))
    assert (batch.trajectories, batch.tokens) == (2, 13)
    assert sum(weight for _, _, weight in targets(batch)) == pytest.approx(0.5, abs=1e-5)
    assert sum(
        weight for _, _, weight in targets(pack([one, three], loss=LossSection(normalizer="trajectory")))
    ) == pytest.approx(1.0, abs=1e-5)
    assert targets(pack([one, two, three])) == targets(pack([one, two]))


def test_only_advantages_of_turns_with_weight_ask_for_a_forward_pass() -> None:
    one = conversations()[0]
    TURN_WEIGHTINGS["last_turn"](one)
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
    policy = LocalLearner(tiny_model(), sampling=Sampling())
    update = asyncio.run(policy.update([batch], lr=1e-2))
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
    policy = LocalLearner(tiny_model(), sampling=Sampling())
    expected = 0.0
    for micro in batch.micro_batches:
        difference_N = micro.targets.behaviour_logprob_N - policy._forward.logprobs(micro)[0].detach()
        expected += float(((difference_N.exp() - difference_N - 1) * micro.targets.weight_N).sum())
    update = asyncio.run(policy.update([batch], lr=0.0))
    assert update.kl == pytest.approx(expected, rel=1e-4)
