"""Whether trainer, engine and a plain forward pass give the same tokens the same probabilities: needs the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from turnwise.chat.renderer import Renderer
from turnwise.doctor.check import Check
from turnwise.engines.local import LocalEngine
from turnwise.environments.environment import environment, user_message
from turnwise.models.distribution import sampling_logits
from turnwise.rollout.limits import Limits
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Opening, Reply, Row, Sampling, Trajectory, Turn

__all__ = ["round_trip"]

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
_QUESTIONS = ("How old is the tree?", "Name a number.")
_EACH = 3
_TOKENS = 12


def round_trip(model: Any, renderer: Renderer, sampling: Sampling, *, threads: int = 0) -> Check:
    """Sample with the engine, compute again with the trainer and with the model alone; compare.

    What is compared are probability ratios: trainer to engine, and model to engine, of each sampled token. Before the first
    optimizer step they are 1, whatever is sampled from.
    """
    name = "log-probs"
    trajectories = _sampled(model, renderer, _ending(model, sampling), threads)
    broken = [one for one in trajectories if one.error is not None]
    if broken:
        assert broken[0].error is not None
        return Check(name, "fail", f"a sampled conversation broke ({broken[0].error.kind}): {broken[0].error.message}")
    alone = max(_alone(model, one, sampling) for one in trajectories)
    shares = try_tree_attention(model)
    batch = pack(trajectories, micro_batch_tokens=2048, share_prompts=shares, keep_zero=True)
    forward = Forward(model, sampling)
    packed, count = 0.0, 0
    with torch.no_grad():
        for micro in batch.micro_batches:
            micro = micro.to(model.device)
            logprob_N, _ = forward.logprobs(micro)
            packed = max(packed, _off(logprob_N, micro.targets.behaviour_logprob_N))
            count += len(logprob_N)
    tolerance = _TOLERANCE.get(model.dtype, 0.5)
    figures = (
        f"{count} tokens of {len(trajectories)} conversations: the probability ratio to the engine is off by {packed:.1e} in "
        f"the trainer ({'shared prompts' if shares else 'separate rows'}) and {alone:.1e} in a plain forward pass"
    )
    if max(packed, alone) <= tolerance:
        return Check(name, "ok", f"{figures} ({str(model.dtype).removeprefix('torch.')}: at most {tolerance:g})")
    return Check(
        name,
        "fail",
        f"{figures}; at most {tolerance:g} is rounding. What is learnt would not be what was sampled: please report it with "
        f"the model's name",
    )


def _ending(model: Any, sampling: Sampling) -> Sampling:
    """The same, with turns that end soon whatever the model has learnt: every eighth token ends one."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return replace(sampling, stop_token_ids=tuple(range(0, vocabulary, 8)))


@environment
async def _asks_on(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Two further questions."""
    yield Opening(messages=row.messages)
    yield user_message("And now?")
    yield user_message("Go on.")
    yield Reply(done=True)


def _sampled(model: Any, renderer: Renderer, sampling: Sampling, threads: int) -> list[Trajectory]:
    """Short conversations, in groups, each turn with an advantage."""
    groups = [
        new_group(Row(id=str(number), messages=[{"role": "user", "content": text}]), size=_EACH, seed=7)
        for number, text in enumerate(_QUESTIONS)
    ]

    async def hold() -> None:
        engine = LocalEngine(model, memory_gb=0.5, threads=threads, decode=renderer.decode)
        table = RolloutContext(
            engine=engine,
            renderer=renderer,
            make_environment=_asks_on,
            sampling=sampling,
            limits=Limits(turns=3, tokens_per_turn=_TOKENS, seconds=None, seconds_per_turn=None),
        )
        await rollout_groups(groups, table)
        await engine.close()

    asyncio.run(hold())
    trajectories = [one for group in groups for one in group.trajectories]
    for number, one in enumerate(trajectories):  # of their own, so that none is computed for another one's sake
        one.advantages = [1.0 + number + turn.index / 8 for turn in one.turns]
    return trajectories


def _alone(model: Any, trajectory: Trajectory, sampling: Sampling) -> float:
    """The largest deviation of the model's own forward pass over whole segments, unpacked."""
    return max(_segments(model, trajectory, sampling), default=0.0)


def _segments(model: Any, trajectory: Trajectory, sampling: Sampling) -> Iterator[float]:
    for segment in trajectory.segments:
        places = [place for place, turn in enumerate(segment.turn) if turn >= 0]
        ids_L = torch.tensor(segment.token_ids, device=model.device)
        target_N = ids_L[places]
        with torch.no_grad():
            logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
        logits_NV = sampling_logits(
            logits_LV[[place - 1 for place in places]],
            temperature_N=sampling.temperature,
            top_k_N=sampling.top_k,
            top_p_N=sampling.top_p,
            min_p_N=sampling.min_p,
            keep_N=target_N,
        )
        logprob_N = logits_NV.log_softmax(dim=-1).gather(-1, target_N[:, None])[:, 0]
        yield _off(logprob_N, torch.tensor(_column(segment.logprobs, places), device=model.device))


def _column(values: Sequence[float], places: Sequence[int]) -> list[float]:
    return [values[place] for place in places]


def _off(logprob_N: torch.Tensor, old_N: torch.Tensor) -> float:
    """The largest distance of a probability ratio from 1; infinite where a ratio is no number."""
    distance_N = ((logprob_N - old_N).exp() - 1.0).abs().nan_to_num(nan=torch.inf)
    return float(distance_N.max()) if len(old_N) else 0.0
