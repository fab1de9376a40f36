"""The check `log-probs`: whether engine, trainer and a plain forward pass compute the same probabilities. Needs weights."""

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
from turnwise.models.model_config import rounding_of_ratios
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Opening, Reply, Row, Sampling, Trajectory, Turn

_TOLERANCE = 1e-3
"""The largest `|ratio - 1|` that float32 explains."""
_BFLOAT16_TOLERANCE = 0.5
"""The same for bfloat16, with small logits; large ones are rounded further (`rounding_of_ratios`)."""
_QUESTIONS = ("How old is the tree?", "Name a number.")
_EACH = 3
_TOKENS = 12


def round_trip(model: Any, renderer: Renderer, sampling: Sampling, *, threads: int = 0) -> Check:
    """Whether the engine's log-probs of sampled tokens equal those of the trainer and of a plain forward pass.

    The check compares probability ratios of each sampled token: trainer to engine, and plain forward pass to engine. Before the
    first optimizer step both ratios are 1, for any sampling options.
    """
    name = "log-probs"
    trajectories = _sampled(model, renderer, _ending(model, sampling), threads)
    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if errors:
        return Check(name, "fail", f"a sampled conversation failed ({errors[0].kind}): {errors[0].message}")
    segments = [found for trajectory in trajectories for found in _segments(model, trajectory, sampling)]
    plain = max((off for off, _ in segments), default=0.0)
    shares = try_tree_attention(model)
    batch = pack(trajectories, micro_batch_tokens=2048, share_prompts=shares, keep_zero=True, masks=renderer.masks)
    forward = Forward(model, sampling)
    packed, count = 0.0, 0
    with torch.no_grad():
        for micro in batch.micro_batches:
            micro = micro.to(model.device)
            logprob_N, _ = forward.logprobs(micro)
            packed = max(packed, _off(logprob_N, micro.targets.behaviour_logprob_N))
            count += len(logprob_N)
    tolerance = _TOLERANCE
    if model.dtype != torch.float32:
        largest = max((logit for _, logit in segments), default=0.0)
        tolerance = max(_BFLOAT16_TOLERANCE, rounding_of_ratios(largest / (sampling.temperature or 1.0)))
    packing = "shared prefixes" if shares else "separate rows"
    figures = (
        f"{count} tokens of {len(trajectories)} conversations: the probability ratio to the engine differs from 1 by at most "
        f"{packed:.1e} in the trainer ({packing}) and {plain:.1e} in a plain forward pass"
    )
    if max(packed, plain) <= tolerance:
        return Check(
            name, "ok", f"{figures} (tolerance for {str(model.dtype).removeprefix('torch.')}: {tolerance:.3g})"
        )
    return Check(
        name,
        "fail",
        f"{figures}. Rounding explains at most {tolerance:.3g}, so training would use other probabilities than sampling. Please "
        f"report it with the model's name",
    )


def _ending(model: Any, sampling: Sampling) -> Sampling:
    """`sampling` with every eighth token of the vocabulary as a stop token, so that turns of any model end soon."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return replace(sampling, stop_token_ids=tuple(range(0, vocabulary, 8)))


@environment
async def _asks_on(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who writes two more messages."""
    yield Opening(messages=row.messages)
    yield user_message("And now?")
    yield user_message("Go on.")
    yield Reply(done=True)


def _sampled(model: Any, renderer: Renderer, sampling: Sampling, threads: int) -> list[Trajectory]:
    """Short sampled conversations, in groups, with an advantage for each turn."""
    groups = [
        new_group(Row(id=str(number), messages=[{"role": "user", "content": text}]), size=_EACH, seed=7)
        for number, text in enumerate(_QUESTIONS)
    ]

    async def sample() -> None:
        engine = LocalEngine(model, memory_gb=0.5, threads=threads, decode=renderer.decode, masks=renderer.masks)
        context = RolloutContext(
            engine=engine,
            renderer=renderer,
            make_environment=_asks_on,
            sampling=sampling,
            limits=Limits(turns=3, tokens_per_turn=_TOKENS, seconds=None, seconds_per_turn=None),
        )
        await rollout_groups(groups, context)
        await engine.close()

    asyncio.run(sample())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    # different advantages, so that no two trajectories are merged
    for number, trajectory in enumerate(trajectories):
        trajectory.advantages = [1.0 + number + turn.index / 8 for turn in trajectory.turns]
    return trajectories


def _segments(model: Any, trajectory: Trajectory, sampling: Sampling) -> Iterator[tuple[float, float]]:
    """The largest `|ratio - 1|` of a plain forward pass over each segment, without packing, and its largest absolute logit."""
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
        behaviour_N = torch.tensor(_column(segment.logprobs, places), device=model.device)
        yield _off(logprob_N, behaviour_N), float(logits_LV.abs().amax())


def _column(values: Sequence[float], places: Sequence[int]) -> list[float]:
    return [values[place] for place in places]


def _off(logprob_N: torch.Tensor, old_N: torch.Tensor) -> float:
    """The largest `|ratio - 1|` of the probability ratios; infinite if a ratio is NaN."""
    distance_N = ((logprob_N - old_N).exp() - 1.0).abs().nan_to_num(nan=torch.inf)
    return float(distance_N.max()) if len(old_N) else 0.0
