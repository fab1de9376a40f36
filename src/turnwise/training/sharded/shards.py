"""The part of learner and critic that each rank has: passes, share of micro-batches, checkpoint.

A rank has its share of the model, of the reference model, of the value model and of the optimizers. The methods are collective:
all ranks call the same method at the same time, which the commands make sure (`commands.py`). Invariant: all ranks compute the
same number of passes. A *round* is one pass on each rank; a rank without a micro-batch in a round computes a pass of weight 0.

Checkpoints are written by all ranks, each its own part, with torch.distributed.checkpoint: the weights (with an adapter, only
those that are trained), the state of the optimizer and a changed reference model. Any number of ranks can load them.
`load_complete` and `complete_state` convert from and to the state of a learner in one process, `consolidation.py` makes files of
the weights. Does not know conversations, or when a checkpoint is due.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from turnwise.errors import ConfigError
from turnwise.models.experts import Choice
from turnwise.models.loading import ModelSource, largest_logit, of_tensors, token_logprobs
from turnwise.models.lora import adapter_weights, has_adapter
from turnwise.models.model_config import context_length
from turnwise.models.precision import use_deterministic_algorithms
from turnwise.models.transfer import Measured, read, to_host
from turnwise.training.batch import MicroBatch, default_micro_batch_tokens
from turnwise.training.checkpoint import copied_to_cpu
from turnwise.training.divergence import TeacherComparison
from turnwise.training.expert_load import (
    Balance,
    ExpertLoad,
    recorded_load,
    refuse_aux_loss_without_experts,
)
from turnwise.training.fingerprint import sync_file
from turnwise.training.forward import LOGITS_BYTES, Forward, TargetValues, shares_prefixes, try_tree_attention
from turnwise.training.learner import BatchRequirements, PackingRequirements
from turnwise.training.losses import Targets, make_loss
from turnwise.training.micro_batch_bound import card_of
from turnwise.training.optimizer import MOMENTS, Optimizer, moments_of
from turnwise.training.options import CriticOptions, ShardOptions
from turnwise.training.pace import Pace
from turnwise.training.reference import reference_model, vocabulary_of
from turnwise.training.sharded.parts import KINDS_OF_WEIGHTS, UNCHANGED, read_parts, saved_parts
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.remembered_bound import FILE, RememberedBound
from turnwise.training.sharded.sharded_model import DividedParts, ShardedModel, complete, divided_as, like, load_sharded
from turnwise.training.sharded.together import own_part
from turnwise.training.update import StopFlag, UpdateSums, load_of, policy_loss
from turnwise.training.value_batch import StatePlaces, ValueTargets
from turnwise.training.value_model import (
    BODY_PREFIX,
    CriticSums,
    ValueForward,
    body_of,
    critic_loss,
    load_head,
    new_value_head,
    trained_parameters,
)
from turnwise.types import Sampling

# Shares: the micro-batches of a batch, divided among ranks in rounds

S = TypeVar("S")


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The indexes of the micro-batches of each rank. `sizes` are their tokens.

    The number of rounds is the smallest possible. The micro-batches of a round have similar sizes, because all ranks wait for
    the largest; over all rounds, each rank has about the same number of tokens.

    Example: sizes `8 3 7 2 1` on 2 ranks give the rounds `8 7`, `3 2`, `1`: `[0, 3, 4]` and `[2, 1]`.
    """
    ordered = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(ordered), ranks):
        # the largest of the round goes to the rank with the fewest tokens so far
        free = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, index in zip(free, ordered[start : start + ranks], strict=False):
            shares[rank].append(index)
            totals[rank] += sizes[index]
    return shares


def rounds_of(
    ranks: Ranks, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag
) -> Iterator[tuple[MicroBatch[Any] | None, MicroBatch[Any] | None]]:
    """For each round, what this rank computes of a micro-batch, and the whole one of its set of ranks; None if there are no more.
    All ranks end together if rank 0 stops."""
    for number in range(rounds):
        # only rank 0 is asked to stop: if it left a round alone, the others would wait for it in collective operations
        if ranks.agree(stop.is_set()):
            return
        whole = mine[number] if number < len(mine) else None
        yield None if whole is None else own_part(whole, ranks.mesh), whole


def measure_rounds(
    ranks: Ranks,
    mine: Sequence[MicroBatch[Any]],
    rounds: int,
    stop: StopFlag,
    bound: RememberedBound,
    compute: Callable[[MicroBatch[Any]], torch.Tensor],
    on_round: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """The results [N] of `compute` for this rank's micro-batches, without gradients, on the CPU; fewer if rank 0 stops.

    Raises MicroBatchTooLarge if the memory of this rank runs out.
    """
    results: list[torch.Tensor] = []
    with torch.no_grad():
        for micro, whole in rounds_of(ranks, mine, rounds, stop):
            with bound.during(whole):
                result_N = compute((micro or _dummy(ranks)).to(ranks.device))
            if micro is not None:
                results.append(result_N)
            on_round()
    return to_host(results)


def accumulate_rounds(
    ranks: Ranks,
    mine: Sequence[MicroBatch[Any]],
    rounds: int,
    stop: StopFlag,
    *,
    bound: RememberedBound,
    sharded: ShardedModel,
    compute: Callable[[MicroBatch[Any]], torch.Tensor],
    loss_of: Callable[[int, MicroBatch[Any]], tuple[torch.Tensor, Callable[[], Measured[S]]]],
    on_round: Callable[[], None],
) -> list[S]:
    """Add the gradients of a batch up, of which this rank computes `mine`. Returns the metrics of each of them.

    `loss_of` gives the loss of a micro-batch, and a function that computes its metrics; its first argument is the index in
    `mine`. `compute` gives the outputs of the model for a round in which the rank has no micro-batch. Raises
    MicroBatchTooLarge if the memory of this rank runs out.
    """
    sums: list[Measured[S]] = []
    for number, (micro, whole) in enumerate(rounds_of(ranks, mine, rounds, stop)):
        sharded.sync_gradients(last=number == rounds - 1)
        with bound.during(whole):
            if micro is None:
                # this rank's parameters are needed by the passes of the others, so it runs both passes, with a gradient of 0
                (compute(_dummy(ranks).to(ranks.device)).sum() * 0.0).backward()
            else:
                with sharded.clock.running(micro.num_tokens):
                    sums.append(_backward(*loss_of(number, micro.to(ranks.device))))
        on_round()
    return read(sums)


def _backward(loss: torch.Tensor, metrics: Callable[[], Measured[S]]) -> Measured[S]:
    """A function of its own, so that no name of a loop keeps the graph during the next pass."""
    loss.backward()
    with torch.no_grad():
        return metrics()


def _dummy(ranks: Ranks) -> MicroBatch[Targets]:
    """Of a micro-batch with one target, what this rank computes in a round without a micro-batch. Its loss is not used."""
    zero_N = torch.zeros(1)
    index_N = torch.zeros(1, dtype=torch.int64)
    micro = MicroBatch(
        token_ids_BL=torch.zeros((1, 2), dtype=torch.int64),
        position_BL=torch.arange(2)[None],
        tree=None,
        row_U=index_N,
        column_U=index_N,
        token_U=index_N,
        prediction_N=index_N,
        targets=Targets(
            token_N=index_N,
            sequence_N=index_N,
            turn_N=index_N,
            version_N=index_N,
            behaviour_logprob_N=zero_N,
            known_N=torch.ones(1, dtype=torch.bool),
            advantage_N=zero_N,
            weight_N=zero_N,
        ),
        count_T=torch.zeros(2),
    )
    return own_part(micro, ranks.mesh)


def _bound(run: Path | None, model: str, ranks: Ranks) -> RememberedBound:
    """What earlier starts of a run have learnt about the memory of these ranks. `run` is its directory."""
    card = card_of(ranks.device)
    return RememberedBound(None if run is None else run / FILE, model, card, ranks.place(card))


# Policy: the part of the learner


class ShardedForward(Forward):
    """`Forward` on a sharded model. All ranks have chunks of logits of the same size, whatever is free on their GPUs."""

    def __init__(
        self, sharded: ShardedModel, sampling: Sampling, *, autocast: bool, router_replay: bool = False
    ) -> None:
        self._sharded = sharded
        sharded.probe(
            lambda: super(ShardedForward, self).__init__(
                sharded.model,
                sampling,
                chunk_bytes=LOGITS_BYTES,
                autocast=autocast,
                router_replay=router_replay,
            )
        )

    def values(
        self,
        micro: MicroBatch[Any],
        *,
        entropy: bool = False,
        on_choice: Callable[[Choice], None] | None = None,
        comparison: TeacherComparison | None = None,
    ) -> TargetValues:
        return self._sharded.run(
            lambda: super(ShardedForward, self).values(
                micro, entropy=entropy, on_choice=on_choice, comparison=comparison
            )
        )

    @torch.no_grad()
    def scores(self, micro: MicroBatch[Any], top_k: int, *, vocabulary: int | None = None) -> torch.Tensor:
        return self._sharded.run(lambda: super(ShardedForward, self).scores(micro, top_k, vocabulary=vocabulary))


class ShardedReference:
    """The reference model or a teacher of a sharded learner: a model of its own, or the trained model without its adapter
    (`model` None)."""

    def __init__(self, forward: ShardedForward, policy: Any, model: ShardedModel | None) -> None:
        self._forward = forward
        self._policy = policy
        self.model = model
        self.mixed = False

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """Log-probabilities [N] of the targets of a micro-batch."""
        if self.model is not None:
            return self._forward.logprobs(micro)[0]
        with _adapter_off(self._policy):
            return self._forward.logprobs(micro)[0]

    def scores(self, micro: MicroBatch[Any], top_k: int) -> torch.Tensor:
        """See `Forward.scores`."""
        vocabulary = vocabulary_of(self._policy)
        with nullcontext() if self.model is not None else _adapter_off(self._policy):
            return self._forward.scores(micro, top_k, vocabulary=vocabulary)

    @torch.no_grad()
    def mix(self, policy: Any, share: float) -> None:
        """See `Reference.mix`."""
        assert self.model is not None  # reference.sync_every needs a copy
        trained = dict(policy.named_parameters())
        for name, parameter in self.model.model.named_parameters():
            parameter.lerp_(trained[name].detach().to(parameter.dtype), share)
        self.mixed = True


class ShardReport:
    """What rank 0 must know of the learner that was built."""

    def __init__(self, shard: ModelShard) -> None:
        self.requirements = shard.requirements
        self.gpus = shard.gpus
        self.context_length = context_length(shard.model.config.to_dict())
        self.trains_adapter = shard.trains_adapter


class ModelShard:
    """See the module. Raises ConfigError if the model cannot be loaded, or cannot be trained by several ranks."""

    def __init__(self, options: ShardOptions, ranks: Ranks) -> None:
        if options.deterministic:
            use_deterministic_algorithms()
        self.ranks = ranks
        self.gpus = ranks.gpus()
        """The memory of all ranks' GPUs before a model is loaded."""
        self.bound = _bound(options.run, "policy", ranks)
        self._loss = make_loss(options.loss, options.correction, options.teacher)
        loaded = load_sharded(options.model, ranks.mesh, options.sharding, fingerprint=True)
        self._sharded, self.base_fingerprint = loaded.sharded, loaded.base_fingerprint
        self.model: Any = self._sharded.model
        shares = self._sharded.probe(
            lambda: shares_prefixes(
                self.model,
                options.share_prompts,
                refusal=f"{type(self.model).__name__} does not give its own log-probabilities back with shared prefixes",
            )
        )
        _attend_in_parts(self._sharded, ranks, shares)
        self.trains_adapter = has_adapter(self.model)
        self._forward = ShardedForward(
            self._sharded, options.sampling, autocast=options.autocast, router_replay=options.router_replay
        )
        refuse_aux_loss_without_experts(self._loss, self.model)
        self.reference = self._make_reference(options, shares)
        self.teachers = {name: self._make_teacher(source, options, shares) for name, source in options.teachers.items()}
        self.parameters = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        self.optimizer = Optimizer(list(self.parameters.values()), options.optimizer, parts=DividedParts())
        self.requirements = BatchRequirements(
            share_prompts=shares,
            logprob_kinds=options.sampling.exact_kinds,
            keep_zero=self._loss.needs_zero_advantages,
            measure_zero=self._loss.measures_all,
            micro_batch_tokens=ranks.mesh.context_size * default_micro_batch_tokens(ranks.device),
            most_tokens=self.bound.tokens(),
            parallel=ranks.sets,
        )

    def _make_reference(self, options: ShardOptions, shares: bool) -> ShardedReference | None:
        """The reference model, divided among the ranks."""
        config = options.reference
        if not self._loss.needs_reference and config is None:
            return None
        path = None if config is None else config.path
        separate = config is not None and config.source == "copy"
        if self.trains_adapter and path is None and not separate:
            return ShardedReference(self._forward, self.model, None)
        # without a path, the files that the trained model was loaded from: its weights before training
        source = options.model.of_base(path or options.model.path)
        sharded = load_sharded(source, self.ranks.mesh, options.sharding, prepare=_freeze).sharded
        sharded.probe(lambda: reference_model(self.model, sharded.model, shares=shares, separate=separate))
        _attend_in_parts(sharded, self.ranks, shares)
        return ShardedReference(
            ShardedForward(sharded, options.sampling, autocast=options.autocast), self.model, sharded
        )

    def _make_teacher(self, source: ModelSource | None, options: ShardOptions, shares: bool) -> ShardedReference:
        """A local teacher, divided among the ranks; None: the trained model without its adapter."""
        if source is None:
            return ShardedReference(self._forward, self.model, None)
        sharded = load_sharded(source, self.ranks.mesh, options.sharding, prepare=_freeze).sharded
        sharded.probe(
            lambda: reference_model(
                self.model, sharded.model, shares=shares, separate=False, option="teacher.path", padded=True
            )
        )
        _attend_in_parts(sharded, self.ranks, shares)
        autocast = options.autocast and source.dtype == "float32"
        return ShardedReference(ShardedForward(sharded, options.sampling, autocast=autocast), self.model, sharded)

    def target_scores(
        self, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag, *, teacher: str | None, top_k: int
    ) -> list[torch.Tensor]:
        """The scores [N, 1 + 2 top_k] of this rank's micro-batches by a teacher, on the CPU; fewer if rank 0 has set its flag."""
        scoring = self._forward if teacher is None else self.teachers[teacher]
        return measure_rounds(self.ranks, mine, rounds, stop, self.bound, lambda micro: scoring.scores(micro, top_k))

    def target_logprobs(
        self, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag, *, reference: bool
    ) -> list[torch.Tensor]:
        """The log-probabilities [N] of this rank's micro-batches, on the CPU; fewer if rank 0 has set its flag."""
        if reference and self.reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceSection")
        compute = self.reference.logprobs if reference and self.reference is not None else self._logprobs
        return measure_rounds(self.ranks, mine, rounds, stop, self.bound, compute)

    def target_entropies(self, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag) -> list[torch.Tensor]:
        """The log-probabilities and entropies [N, 2] of this rank's micro-batches, on the CPU; fewer if rank 0 stops."""
        return measure_rounds(self.ranks, mine, rounds, stop, self.bound, self._forward.entropies)

    def _logprobs(self, micro: MicroBatch[Any]) -> torch.Tensor:
        return self._forward.logprobs(micro)[0]

    def accumulate(
        self, mine: Sequence[MicroBatch[Targets]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> UpdateSums:
        """Replace the gradients by those of a batch, of which this rank computes `mine`. Returns the sums over `mine`."""
        self.optimizer.zero_grad()
        references: list[torch.Tensor] = []
        if self._loss.needs_reference:
            # before the passes with gradients, which may use the same layers
            references = self.target_logprobs(mine, rounds, stop, reference=True)

        balance = self._balance(mine, rounds, stop)

        def loss_of(number: int, micro: MicroBatch[Targets]) -> tuple[torch.Tensor, Callable[[], Measured[UpdateSums]]]:
            reference_N = references[number].to(self.ranks.device) if references else None
            return policy_loss(self._forward, self._loss, micro, reference_N, balance)

        sums = accumulate_rounds(
            self.ranks,
            mine,
            rounds,
            stop,
            bound=self.bound,
            sharded=self._sharded,
            compute=self._logprobs,
            loss_of=loss_of,
            on_round=on_round,
        )
        return sum(sums, UpdateSums())

    def take_pace(self) -> Pace:
        """What this rank has computed in `accumulate` since the last call."""
        return self._sharded.clock.take()

    def _balance(self, mine: Sequence[MicroBatch[Targets]], rounds: int, stop: StopFlag) -> Balance | None:
        """What the auxiliary loss of the experts must know of the batch of all ranks; None without such a loss."""
        routers, coefficient = self._forward.routers, self._loss.options.router_aux_loss_coef
        if routers is None or not coefficient:
            return None
        known = recorded_load(mine, routers) if self._forward.router_replay else None
        # all ranks measure if one of them must: the passes are collective
        if bool(self.ranks.total(torch.tensor([0 if known is not None else 1]))):
            loads: list[Measured[ExpertLoad]] = []

            def measure(micro: MicroBatch[Any]) -> torch.Tensor:
                logprob_N, load = load_of(self._forward, micro)
                loads.append(load)
                return logprob_N

            measure_rounds(self.ranks, mine, rounds, stop, self.bound, measure)
            known = sum(read(loads), ExpertLoad.none(routers))
        assert known is not None
        total = self.ranks.total(torch.cat([torch.from_numpy(known.count_LE).flatten(), torch.tensor([known.tokens])]))
        counts = total[:-1].view(known.count_LE.shape).numpy()
        load = ExpertLoad(counts, float(total[-1]))
        return Balance(coefficient, load.tokens, load.fraction)

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Learner.token_logprobs`."""
        with torch.no_grad():
            return self._sharded.run(lambda: token_logprobs(self.model, token_ids, device=self.ranks.device))

    def largest_logit(self, token_ids: Sequence[int]) -> float:
        """See `Learner.largest_logit`."""
        with torch.no_grad():
            return self._sharded.run(lambda: largest_logit(self.model, token_ids, device=self.ranks.device))

    def mix_reference(self, share: float) -> None:
        """See `Learner.mix_reference`."""
        if self.reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceSection")
        self.reference.mix(self.model, share)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All weights by the names of the state dict, or those of the adapter by peft's names; divided."""
        return adapter_weights(self.model) if self.trains_adapter else self.model.state_dict()

    def distinct_tensors(self) -> dict[str, torch.Tensor]:
        """Those of `state_tensors`, of tied weights only the first."""
        local, places = DividedParts().local, set[tuple[int, torch.Size]]()
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_tensors().items():
            place = (local(tensor).data_ptr(), tensor.shape)
            if place not in places or not local(tensor).numel():
                places.add(place)
                found[name] = tensor
        return found

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the model by their names in it; divided."""
        return self.model.state_dict()

    def fingerprint(self) -> str | None:
        """See `Learner.fingerprint`; on rank 0."""
        return self._fingerprint_of(self.model)

    def reference_fingerprint(self) -> str | None:
        """See `Learner.reference_fingerprint`; on rank 0."""
        if self.reference is None:
            return None
        return (
            self.base_fingerprint if self.reference.model is None else self._fingerprint_of(self.reference.model.model)
        )

    def teacher_fingerprints(self) -> dict[str, str | None]:
        """See `Learner.teacher_fingerprints`; on rank 0."""
        return {
            name: self.base_fingerprint if teacher.model is None else self._fingerprint_of(teacher.model.model)
            for name, teacher in self.teachers.items()
        }

    def _fingerprint_of(self, model: Any) -> str | None:
        state = model.state_dict()
        lines = of_tensors((name, complete(state[name])) for name in sorted(state))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest() if self.ranks.leads else None


def _attend_in_parts(sharded: ShardedModel, ranks: Ranks, shares: bool) -> None:
    """Let a model attend to tokens of other ranks, if `cluster.mesh.context` divides them. `shares`: it has tree attention, which
    does. Raises ConfigError if it cannot: a model that computes prefix trees computes nothing else from neighboring tokens."""
    context = ranks.mesh.context
    if context is None or shares or sharded.probe(lambda: try_tree_attention(sharded.model)):
        return
    raise ConfigError(
        f"cluster.mesh.context={context.size()}: the attention of {type(sharded.model).__name__} cannot be computed for parts of "
        f"the tokens, because it does not give the model's own log-probabilities back. Use cluster.mesh.shard instead"
    )


def _freeze(model: Any) -> None:
    model.requires_grad_(False)


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """The model without its adapter. Only one thread uses the model of a rank."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters(False)` would also freeze the adapter's weights
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# Critic: the part of the value model

HEAD_PREFIX = "value_head."
"""What the names of the value head begin with in `CriticShard.state_tensors`."""


class ShardedValueForward(ValueForward):
    """`ValueForward` on a sharded model."""

    def __init__(self, sharded: ShardedModel, head: torch.nn.Linear, *, autocast: bool) -> None:
        super().__init__(sharded.model, head, autocast=autocast)
        self._sharded = sharded

    def values(self, micro: MicroBatch[Any]) -> torch.Tensor:
        return self._sharded.run(lambda: super(ShardedValueForward, self).values(micro))


class CriticShard:
    """See the module. Raises ConfigError if the value model cannot be loaded, or cannot be trained by several ranks."""

    def __init__(self, options: CriticOptions, ranks: Ranks) -> None:
        self.ranks = ranks
        self.bound = _bound(options.run, "critic", ranks)
        self._clip = options.clip
        heads: list[torch.nn.Linear] = []

        def prepare(model: Any) -> torch.nn.Module:
            # the output layer is not used, unless it is the embedding too
            trained = {id(parameter) for parameter in body_of(model).parameters() if parameter.requires_grad}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in trained)
            heads.append(new_value_head(model))
            if options.head is not None:
                load_head(heads[-1], options.head)
            return heads[-1]

        loaded = load_sharded(options.model, ranks.mesh, options.sharding, prepare=prepare, fingerprint=True)
        self._sharded, self.base_fingerprint = loaded.sharded, loaded.base_fingerprint
        self.model: Any = self._sharded.model
        self._head = heads[-1]
        shares = self._sharded.probe(
            lambda: shares_prefixes(
                self.model,
                options.share_prompts,
                refusal=f"the critic ({type(self.model).__name__}) does not give its own values back with shared prefixes",
            )
        )
        _attend_in_parts(self._sharded, ranks, shares)
        self.trains_adapter = has_adapter(self.model)
        self._forward = ShardedValueForward(self._sharded, self._head, autocast=options.autocast)
        self.parameters = trained_parameters(self.model, self._head)
        self.optimizer = Optimizer(list(self.parameters.values()), options.optimizer, parts=DividedParts())
        self.reference = None
        self.requirements = PackingRequirements(
            share_prompts=shares,
            micro_batch_tokens=ranks.mesh.context_size * default_micro_batch_tokens(ranks.device),
            most_tokens=self.bound.tokens(),
            parallel=ranks.sets,
        )

    def measure(
        self, mine: Sequence[MicroBatch[StatePlaces]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> list[torch.Tensor]:
        """The values [N] of this rank's micro-batches, on the CPU; fewer if rank 0 has set its flag."""
        return measure_rounds(self.ranks, mine, rounds, stop, self.bound, self._forward.values, on_round)

    def accumulate(
        self, mine: Sequence[MicroBatch[ValueTargets]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> CriticSums:
        """Replace the gradients by those of a batch, of which this rank computes `mine`. Returns the sums over `mine`."""
        self.optimizer.zero_grad()
        sums = accumulate_rounds(
            self.ranks,
            mine,
            rounds,
            stop,
            bound=self.bound,
            sharded=self._sharded,
            compute=self._forward.values,
            loss_of=lambda number, micro: critic_loss(self._forward, micro, clip=self._clip),
            on_round=on_round,
        )
        return sum(sums, CriticSums())

    def take_pace(self) -> Pace:
        """See `ModelShard.take_pace`."""
        return self._sharded.clock.take()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The weights as in `ModelShard.state_tensors`, and those of the value head; divided."""
        weights = adapter_weights(self.model) if self.trains_adapter else self.model.state_dict()
        return {**weights, **{f"{HEAD_PREFIX}{name}": tensor for name, tensor in self._head.state_dict().items()}}


# Checkpoint: each rank writes its own part

Shard = ModelShard | CriticShard


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """What a rank has written."""

    sums: Mapping[str, str]
    """The SHA-256 of its files by their names."""
    problem: str | None = None
    """Why it could not."""


def save(shard: Shard, folder: Path) -> WrittenParts:
    """Write the state of all ranks into `folder`, and flush it to disk."""
    return _write(_tensors(shard), folder, shard.ranks)


def of_all(written: WrittenParts, ranks: Ranks) -> dict[str, str]:
    """The sums of all ranks, on rank 0. Raises OSError there if a rank could not write: the others go on."""
    parts: Sequence[WrittenParts] = ranks.gather_each(written)
    problems = [f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem is not None]
    if problems:
        raise OSError("; ".join(problems))
    return {name: digest for part in parts for name, digest in part.sums.items()}


def _write(tensors: Mapping[str, torch.Tensor], folder: Path, ranks: Ranks) -> WrittenParts:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)
            writer = FileSystemWriter(folder, thread_count=1)
            dcp_save.save(dict(tensors), storage_writer=writer, process_group=ranks.saving)
        own = [*folder.glob(f"__{ranks.rank}_*"), *(folder.glob(".metadata") if ranks.leads else ())]
        return WrittenParts({path.name: sync_file(path) for path in own})
    except CheckpointException as error:  # all ranks have it
        return WrittenParts(
            {}, next((str(cause) for rank, (cause, _) in error.failures.items() if rank == ranks.rank), None)
        )
    except (OSError, RuntimeError) as error:  # a rank that was lost is the error of the next operation of all ranks
        return WrittenParts({}, str(error))


class Saving:
    """Writes a copy of the state of a rank in a thread. `start` and `finish` are called once, in this order, on all ranks."""

    def __init__(self, shard: Shard) -> None:
        self._ranks = shard.ranks
        tensors = _tensors(shard)
        local = DividedParts().local
        copies = copied_to_cpu({name: local(tensor) for name, tensor in tensors.items()})
        self._tensors = {name: divided_as(copies[name], tensor) for name, tensor in tensors.items()}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[WrittenParts] | None = None

    def start(self, folder: Path) -> None:
        """Begin to write into `folder`."""
        self._written = self._thread.submit(_write, self._tensors, folder, self._ranks)
        self._thread.shutdown(wait=False)

    def join(self) -> None:
        """Wait until this rank has written, or could not."""
        assert self._written is not None
        wait([self._written])

    def finish(self) -> WrittenParts:
        """Wait for the result, which is that of `save`."""
        assert self._written is not None
        return self._written.result()


def load(shard: Shard, folder: Path) -> None:
    """Load the state of all ranks from `folder`, in place. Raises RunError on all ranks if one of them cannot read its part."""
    saved = saved_parts(folder)
    if shard.reference is not None and shard.reference.model is not None:
        shard.reference.mixed = any(name.startswith("reference/") for name in saved)
    tensors = _tensors(shard)
    # float32 weights on the ranks' devices were their own master weights (optimizer.offload may change)
    new_masters = {name for name in shard.parameters if f"master/{name}" in tensors.keys() - saved.keys()}
    for name in new_masters:
        del tensors[f"master/{name}"]
    for name in _unchanged(shard):
        tensors.pop(f"{UNCHANGED}/{name}")  # loaded with the model
    read_parts(tensors, folder)
    tensors.update({f"master/{name}": tensors[f"model/{name}"] for name in new_masters})
    _load_optimizer(shard.optimizer, list(shard.parameters), tensors)


def load_complete(shard: Shard, state: Mapping[str, Any]) -> None:
    """Load the state of a learner in one process (`Learner.state`)."""
    names = list(shard.parameters)
    tensors: dict[str, Any] = {"steps": torch.tensor(state["steps"])}
    for index, name in enumerate(names):
        parameter, of_parameter = shard.parameters[name], state["optimizer"]["state"].get(index, {})
        if of_parameter:
            moments = moments_of(of_parameter)
            tensors[f"optimizer/{name}/step"] = moments["step"]
            for moment in MOMENTS:
                tensors[f"optimizer/{name}/{moment}"] = like(moments[moment], parameter)
        if state["masters"]:
            tensors[f"master/{name}"] = like(state["masters"][index], parameter)
        if state.get("errors"):
            tensors[f"error/{name}"] = like(state["errors"][index], parameter)
    _load_optimizer(shard.optimizer, names, tensors)
    if state.get("reference") and shard.reference is not None and shard.reference.model is not None:
        shard.reference.mixed = True
        with torch.no_grad():
            for name, parameter in shard.reference.model.model.named_parameters():
                parameter.copy_(like(state["reference"][name], parameter))


def complete_state(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The state of a learner in one process (`Learner.state`) from the files of any number of ranks.

    `names` are those of the trained parameters, in their order. Raises RunError if a file cannot be read.
    """
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in saved_parts(folder).items()
        if name.partition("/")[0] not in KINDS_OF_WEIGHTS
    }
    read_parts(tensors, folder, alone=True)
    state = {
        index: {key: tensors[f"optimizer/{name}/{key}"] for key in ("step", *MOMENTS)}
        for index, name in enumerate(names)
    }
    masters, errors = (
        [tensors[f"{kind}/{name}"] for name in names if f"{kind}/{name}" in tensors] for kind in ("master", "error")
    )
    prefix = "reference/"
    return {
        "optimizer": {"state": state, "param_groups": [{"params": list(range(len(names)))}]},
        "masters": masters,
        "errors": errors,
        "steps": int(tensors["steps"]),
        "reference": {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)},
    }


def _tensors(shard: Shard) -> dict[str, torch.Tensor]:
    """The state of this rank by names. Where the optimizer has none yet, zeros, which is its state before the first step."""
    optimizer = shard.optimizer
    tensors: dict[str, torch.Tensor] = {"steps": torch.tensor(optimizer.steps)}
    of_parameters = zip(shard.parameters.items(), optimizer.moments(), optimizer.masters, strict=True)
    for (name, parameter), moments, master in of_parameters:
        tensors[f"model/{name}"] = parameter.detach()
        tensors[f"optimizer/{name}/step"] = moments["step"]
        for moment in MOMENTS:
            tensors[f"optimizer/{name}/{moment}"] = divided_as(moments[moment], parameter)
        if optimizer.keeps_copies:
            tensors[f"master/{name}"] = divided_as(master.detach(), parameter)
    for (name, parameter), error in zip(shard.parameters.items(), optimizer.errors, strict=False):
        tensors[f"error/{name}"] = divided_as(error, parameter)
    tensors |= {f"{UNCHANGED}/{name}": tensor for name, tensor in _unchanged(shard).items()}
    reference = shard.reference
    if reference is not None and reference.model is not None and reference.mixed:
        for name, parameter in reference.model.model.named_parameters():
            tensors[f"reference/{name}"] = parameter.detach()
    return tensors


def _unchanged(shard: Shard) -> dict[str, torch.Tensor]:
    """What the model has besides the weights that are trained: buffers and frozen weights; nothing if they are saved elsewhere,
    as the model under an adapter."""
    if shard.trains_adapter:
        return {}
    trained, kept = {id(parameter) for parameter in shard.parameters.values()}, shard.model.state_dict().keys()
    tensors = itertools.chain(shard.model.named_parameters(), shard.model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors if name in kept and id(tensor) not in trained}


def body_prefix(shard: Shard) -> dict[str, str]:
    """What trained weights have in front of their names, and what the model has there instead; empty if it is the same."""
    if isinstance(shard, ModelShard):
        return {}
    body = body_of(shard.model)
    return {BODY_PREFIX: next(f"{name}." for name, module in shard.model.named_modules() if module is body)}


def _load_optimizer(optimizer: Optimizer, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the optimizer its state. Weights and master weights in `tensors` may be its own tensors."""
    local = DividedParts().local

    def parts(kind: str) -> list[torch.Tensor]:
        return [local(tensors[f"{kind}/{name}"]) for name in names if f"{kind}/{name}" in tensors]

    state = {
        index: {key: local(tensors[f"optimizer/{name}/{key}"]) for key in ("step", *MOMENTS)}
        for index, name in enumerate(names)
        if f"optimizer/{name}/{MOMENTS[0]}" in tensors
    }
    optimizer.load_state(
        {
            "optimizer": {"state": state, "param_groups": [{"params": list(range(len(names)))}]},
            "masters": parts("master"),
            "errors": parts("error"),
            "steps": int(tensors["steps"]),
        }
    )
