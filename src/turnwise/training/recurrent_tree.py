"""Recurrent layers over a tree of sequences: a common prefix is computed once, and each continuation begins with its state.

Attention reads the keys of a token's own sequence wherever they lie in the flat row (`tree.py`). A recurrent layer (linear
attention, Mamba, a short convolution) has read the tokens before in order, and keeps a state. So the flat row is cut where
sequences part: a piece is computed from the state at the end of the piece before it in its sequence, and its own last state is
given to all pieces that continue it, with gradients through it. Example: the sequences `p q a`, `p q b c` and `p x`, each piece
with the index of the piece that it continues::

    flat row  p | q | a | b c | x          p: root   q: 0   a: 1   b c: 1   x: 0

Leaves, whose last state nobody needs, are computed together, with padding on the right. A layer gets its state as transformers'
cache, whose interface all recurrent layers of transformers use. A layer that does not begin with a given state, or whose kernel
has no gradient for it, gives other logits on a small tree, or fails there; such a model computes each sequence by itself.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from turnwise.models.selective_scan import continue_selective_scans
from turnwise.training.tree import FlatRun, Tree, current_tree

_UPDATES = ("update_conv_state", "update_recurrent_state")
_CACHES = ("cache", "cache_params", "past_key_values")
_MASKS = ("attention_mask", "mask")
_SHORTEST = 0.5
"""The length of a leaf, in proportion to the longest, from which it is computed together with it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of the flat row between which no sequences part."""

    start: int
    length: int
    parent: int | None
    """The index of the piece that it continues; None at the beginning of a sequence."""
    depth: int


def pieces_of(runs: Sequence[FlatRun]) -> list[Piece]:
    """The pieces of a flat row, in its order."""
    parted = {int(run.context[-1]) + 1 for run in runs if len(run.context)}  # places after which sequences part
    pieces: list[Piece] = []
    ending: dict[int, int] = {}  # the piece that ends before a place
    for run in runs:
        parent = ending[int(run.context[-1]) + 1] if len(run.context) else None
        cuts = sorted(
            {run.start + run.length, *(place for place in parted if run.start < place < run.start + run.length)}
        )
        start = run.start
        for end in cuts:
            depth = 0 if parent is None else pieces[parent].depth + 1
            pieces.append(Piece(start, end - start, parent, depth))
            parent = ending[end] = len(pieces) - 1
            start = end
    return pieces


def _keeps_state(pieces: Sequence[Piece]) -> set[int]:
    """The pieces whose last state is kept for those that continue them. A continuation of a single token is not: the kernels of
    one step change the state in place and have no gradient. Those that continue it compute its token again, from the state
    before."""
    parents = {piece.parent for piece in pieces}
    return {
        index for index, piece in enumerate(pieces) if index in parents and (piece.parent is None or piece.length > 1)
    }


@dataclass(frozen=True, slots=True)
class _Row:
    """A piece as a row of a call."""

    piece: int
    spans: Sequence[tuple[int, int]]
    """Start and end of what is computed: pieces before it whose state is not kept, and the piece itself."""
    length: int
    """Tokens of the piece itself, the last ones."""
    before: int | None
    """The piece whose state it begins with; None at the beginning of a sequence."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The calls of a recurrent layer for a flat row, parents first."""

    calls: Sequence[Sequence[_Row]]
    keeping: Collection[int]

    @classmethod
    def of(cls, tree: Tree, runs: Sequence[FlatRun]) -> _Plan:
        """The plan of a tree's `runs`, made once for all layers and for both passes of gradient checkpointing."""
        if (plan := tree.memo.get("recurrent")) is None:
            pieces = pieces_of(runs)
            keeping = _keeps_state(pieces)
            calls = [[_row(pieces, index, keeping) for index in call] for call in _calls(pieces, keeping)]
            plan = tree.memo["recurrent"] = cls(calls, keeping)
        return plan


def _row(pieces: Sequence[Piece], index: int, keeping: Collection[int]) -> _Row:
    path, before = [pieces[index]], pieces[index].parent
    while before is not None and before not in keeping:
        path.insert(0, pieces[before])
        before = pieces[before].parent
    return _Row(index, [(one.start, one.start + one.length) for one in path], pieces[index].length, before)


def _calls(pieces: Sequence[Piece], keeping: Collection[int]) -> Iterator[list[int]]:
    """The pieces that are computed in one call, parents first. A piece whose state is kept is alone: padding would change it.
    Roots and continuations are separate, because only these have a state before."""
    for depth in range(max(piece.depth for piece in pieces) + 1):
        here = [index for index, piece in enumerate(pieces) if piece.depth == depth]
        yield from ([index] for index in here if index in keeping)
        others = sorted((index for index in here if index not in keeping), key=lambda index: -pieces[index].length)
        group: list[int] = []
        for index in others:
            if group and pieces[index].length < _SHORTEST * pieces[group[0]].length:
                yield group
                group = []
            group.append(index)
        if group:
            yield group


_States = Mapping[str, Mapping[int, torch.Tensor]]


class _Cache:
    """The state of one layer, as transformers' cache of all layers: what `Cache` and its layer for linear attention answer."""

    record_past = True
    """The convolution is then computed from its window and the new tokens, not by a kernel that changes the window in place."""

    def __init__(self, states: _States | None) -> None:
        self._previous = states is not None
        self.conv_states: dict[int, torch.Tensor] = dict((states or {}).get("conv_states", {}))
        self.recurrent_states: dict[int, torch.Tensor] = dict((states or {}).get("recurrent_states", {}))
        self.layers = _AnyLayer(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._previous

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        """The window before the new columns, and the new columns; the last `conv_kernel_size` of them are the next window."""
        known = self.conv_states.get(state_idx)
        columns = conv_states if known is None else torch.cat([known, conv_states], dim=-1)
        missing = max(0, conv_kernel_size - columns.shape[-1])
        self.conv_states[state_idx] = F.pad(columns, (missing, 0))[..., -conv_kernel_size:]
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0
    ) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @property
    def states(self) -> _States:
        return {"conv_states": self.conv_states, "recurrent_states": self.recurrent_states}


class _AnyLayer:
    """`cache.layers[index]`, which is the same for each index: a layer asks for its own only."""

    def __init__(self, cache: _Cache) -> None:
        self._cache = weakref.proxy(cache)

    def __getitem__(self, index: int) -> Any:
        return self._cache


def has_recurrent_layers(model: Any) -> bool:
    """Whether layers of the model keep a state."""
    return any(_is_recurrent(type(module)) for module in model.modules())


def use_recurrent_tree(model: Any) -> Callable[[], None]:
    """Let the recurrent layers of a model compute a tree in `tree_attention`; other passes are as before. Returns a function that
    takes it back.

    Raises ValueError if a recurrent layer takes no state.
    """
    continue_selective_scans(model)
    changed = [module for module in model.modules() if _is_recurrent(type(module)) and not hasattr(module, _MARK)]
    for module in changed:
        parameters = inspect.signature(module.forward).parameters
        names = [name for name in _CACHES if name in parameters]
        if not names or "hidden_states" not in parameters:
            raise ValueError(f"{type(module).__name__} takes no state")
        masks = [name for name in _MASKS if name in parameters]
        setattr(module, _MARK, True)
        module.forward = functools.partial(_forward, module.forward, names[0], masks)

    def restore() -> None:
        for module in changed:
            del module.forward
            delattr(module, _MARK)

    return restore


_MARK = "_turnwise_recurrent_tree"


@functools.cache
def _is_recurrent(kind: type) -> bool:
    """Whether a class of modules writes states into a cache."""
    functions = [inspect.unwrap(value) for value in vars(kind).values() if callable(value)]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return any(name in code.co_names for code in codes for name in _UPDATES)


def _forward(forward: Callable[..., Any], cache: str, masks: Sequence[str], /, *arguments: Any, **options: Any) -> Any:
    tree = current_tree()
    if tree is None:
        return forward(*arguments, **options)
    if len(arguments) > 1:
        raise TypeError("a recurrent layer has got its state and its mask by position")
    hidden_1TD = arguments[0] if arguments else options.pop("hidden_states")
    options |= dict.fromkeys(masks)  # nothing is padded on the left

    def continued(hidden_BLD: torch.Tensor, state: _Cache) -> torch.Tensor:
        return forward(hidden_BLD, **{**options, cache: state})

    # a state is that after all tokens before, so ranks with parts of the row compute all of it
    return tree.with_all_tokens(
        hidden_1TD[0], lambda hidden_TD, runs: _compute(_Plan.of(tree, runs), hidden_TD, continued)
    )[None]


def _compute(
    plan: _Plan, hidden_TD: torch.Tensor, forward: Callable[[torch.Tensor, _Cache], torch.Tensor]
) -> torch.Tensor:
    """The output of a recurrent layer for the flat row, [T, D]."""
    outputs: dict[int, torch.Tensor] = {}
    states: dict[int, _States] = {}
    for call in plan.calls:
        rows = [torch.cat([hidden_TD[start:end] for start, end in row.spans]) for row in call]
        known = [states[row.before] for row in call if row.before is not None]
        hidden_BLD = pad_sequence(rows, batch_first=True)
        keeps = call[0].piece in plan.keeping
        if hidden_BLD.shape[1] == 1 and not keeps:
            hidden_BLD = F.pad(hidden_BLD, (0, 0, 0, 1))  # not a single step
        cache = _Cache(_stacked(known) if known else None)
        output_BLD = forward(hidden_BLD, cache)
        for output_LD, tokens, row in zip(output_BLD, rows, call, strict=True):
            outputs[row.piece] = output_LD[len(tokens) - row.length : len(tokens)]
        if keeps:
            states[call[0].piece] = cache.states
    return torch.cat([outputs[piece] for piece in sorted(outputs)])


def _stacked(states: Sequence[_States]) -> _States:
    """The states of several rows in one batch."""
    return {
        kind: {number: torch.cat([state[kind][number] for state in states]) for number in numbers}
        for kind, numbers in states[0].items()
    }
