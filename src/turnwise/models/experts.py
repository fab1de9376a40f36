"""Mixtures of experts: where a model chooses the experts of a token, and how a pass records or prescribes the choice.

A router of transformers chooses with one call of `topk` over the scores of all experts, and computes the weights of the chosen
experts from its result. A pass inside `RouterPass.active` sees this call: it notes the experts, and with `replay` it answers
with the experts that were recorded, and their present scores. So normalisation, scaling and gradients of the weights are those
of the model's own code, whatever they are. Nothing depends on the name of an architecture: `Routers.of` finds the calls by
running a few tokens, and checks that a prescribed choice is used. Outside of a `RouterPass`, a model computes as ever.

Knows modules and tensors of one forward pass. Does not know the engine's cache, batches, or losses. Axis suffixes: T tokens of a
pass (rows one after the other, padding included), L layers with experts, E experts of a layer, K experts of a token.

Papers: routing replay, GSPO (arXiv 2507.18071); with the routes of the sampling engine, R3 (arXiv 2510.11370).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from turnwise.errors import ConfigError

# One choice: the call of `topk` in a router


@dataclass(frozen=True, slots=True)
class _Router:
    """A module that chooses the experts of one layer."""

    layer: int
    """Number of the layer among those with experts."""
    call: int
    """Which of the calls of `topk` over all experts, made directly in the module, is the choice."""
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts that a layer uses for the tokens of a pass."""

    layer: int
    index_TK: torch.Tensor
    own_TK: torch.Tensor
    """Those that the router itself has chosen; `index_TK` itself without replay."""
    scores_TE: torch.Tensor
    """What the router has computed of all experts before the choice. Has a gradient."""
    function: str
    """The function that gave the scores: `softmax`, `sigmoid`, or empty for logits."""

    def probabilities(self) -> torch.Tensor:
        """The router's distribution over all experts, float32 [T, E]: a softmax of its logits, or for sigmoid routers the
        sigmoids divided by their sum (DeepSeek-V3, arXiv 2412.19437, equation 19). Has a gradient."""
        scores_TE = self.scores_TE.float()
        if self.function == "sigmoid":
            return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
        return scores_TE if self.function else scores_TE.softmax(dim=-1)


class _RouterCall(TorchFunctionMode):
    """Watches the functions that a router calls."""

    def __init__(self, router: _Router, running: RouterPass) -> None:
        super().__init__()
        self._router, self._pass = router, running
        self._calls = 0
        self._scores: tuple[str, torch.Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("softmax", "sigmoid") and _over(result, self._router.experts):
            self._scores = (name, result)
        if name == "topk" and _over(args[0], self._router.experts):
            self._calls += 1
            if self._calls - 1 == self._router.call:
                return self._chosen(args[0], result)
        return result

    def _chosen(self, scored_TE: torch.Tensor, result: Any) -> Any:
        name, scores_TE = self._scores or ("", scored_TE)
        replayed_TK = self._pass.replayed(self._router.layer, len(scored_TE))
        index_TK = own_TK = result.indices
        if replayed_TK is not None:
            known_TK = replayed_TK >= 0
            index_TK = torch.where(known_TK, replayed_TK, index_TK)
            # Routers use these values only where they are scores themselves; others (with a bias, or limited to groups of
            # experts) choose with what they pass to `topk`, and read the weights from the scores.
            result = torch.return_types.topk((scores_TE.gather(-1, index_TK), index_TK))
        self._pass.note(Choice(self._router.layer, index_TK, own_TK, scores_TE, name))
        return result


def _over(values: Any, experts: int) -> bool:
    return isinstance(values, torch.Tensor) and values.ndim == 2 and values.shape[-1] == experts


# A pass

_current: ContextVar[RouterPass | None] = ContextVar("router_pass", default=None)


class RouterPass:
    """One forward pass, or its recomputation in the backward pass: which experts are prescribed, and which were used.

    `replay_TLK` are the experts to use, with -1 where the router chooses itself; None: it always does. `on_choice` is called once
    for each layer. Gradient checkpointing computes a layer again: the same experts are prescribed, and `on_choice` is not called.
    """

    def __init__(self, on_choice: Callable[[Choice], None], replay_TLK: torch.Tensor | None = None) -> None:
        self._on_choice, self._replay_TLK = on_choice, replay_TLK
        self._noted: set[int] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward passes inside the context are this pass."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def replayed(self, layer: int, tokens: int) -> torch.Tensor | None:
        """The experts that are prescribed for a layer, int64 [T, K]. Raises ValueError if the pass has other tokens."""
        if self._replay_TLK is None:
            return None
        if len(self._replay_TLK) != tokens:
            raise ValueError(f"a pass of {tokens} tokens got the experts of {len(self._replay_TLK)} tokens")
        return self._replay_TLK[:, layer].long()

    def note(self, choice: Choice) -> None:
        """Take a choice of the model."""
        if choice.layer not in self._noted:
            self._noted.add(choice.layer)
            self._on_choice(choice)


_calls = threading.local()
"""The router calls of a thread that are running: micro-batches may be computed in several threads."""


def _begin(router: _Router, module: torch.nn.Module, args: Any) -> None:
    running = _current.get()
    call = None if running is None else _RouterCall(router, running)
    if call is not None:
        call.__enter__()
    stack = getattr(_calls, "stack", None)
    if stack is None:
        stack = _calls.stack = []
    stack.append(call)


def _end(module: torch.nn.Module, args: Any, output: Any) -> None:
    if (call := _calls.stack.pop()) is not None:
        call.__exit__(None, None, None)


# The routers of a model

_MARK = "turnwise_router"


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, which can be watched."""

    layers: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """The routers of a model, or None if it has no experts. Runs a few tokens the first time.

        Raises ConfigError, with the reason, if the model chooses experts in a way that cannot be watched.
        """
        blocks = expert_modules(model)
        if not blocks:
            return None
        routers = [router for module in model.modules() if (router := getattr(module, _MARK, None)) is not None]
        if not routers:
            routers = _find(model, blocks)
        sizes = {(router.experts, router.top_k) for router in routers}
        if len(sizes) > 1:
            raise _unwatched(model, f"its layers have different numbers of experts: {sorted(sizes)}")
        (experts, top_k) = sizes.pop()
        return cls(len(routers), experts, top_k)

    @classmethod
    def watchable(cls, model: Any) -> Routers | None:
        """The routers of a model for metrics: None also if they cannot be watched, or if the model has no weights."""
        try:
            return None if next(model.parameters()).is_meta else cls.of(model)
        except ConfigError:
            return None

    @classmethod
    def required(cls, model: Any) -> Routers:
        """The routers of a model whose experts are to be recorded or used again. Raises ConfigError if it has none."""
        routers = cls.of(model)
        if routers is None:
            raise _no_mixture(model)
        return routers


def expert_modules(model: Any) -> list[str]:
    """The names of the modules with the stacked weights of the experts of a layer, in the order of the layers."""
    return [
        name
        for name, module in model.named_modules()
        if name.split(".")[-1] == "experts" and any(weight.ndim == 3 for weight in module.parameters(recurse=False))
    ]


def layers_with_experts(model: Any) -> tuple[tuple[int, ...], int]:
    """The numbers of the layers with experts among all layers of a model, and the experts of such a layer. The model may be on
    torch's meta device. Raises ConfigError if it has no experts, or if the layers have no numbers."""
    modules = dict(model.named_modules())
    blocks = expert_modules(model)
    if not blocks:
        raise _no_mixture(model)
    numbers = [next((int(part) for part in name.split(".") if part.isdigit()), None) for name in blocks]
    experts = {
        len(next(weight for weight in modules[name].parameters(recurse=False) if weight.ndim == 3)) for name in blocks
    }
    layers = [number for number in numbers if number is not None]
    if len(layers) < len(numbers) or len(experts) > 1:
        raise _unwatched(model, f"its modules {', '.join(blocks[:3])} belong to no numbered layer, or differ in size")
    return tuple(layers), experts.pop()


def _find(model: Any, blocks: Sequence[str]) -> list[_Router]:
    """Mark the modules that choose experts, and give them hooks."""
    names = {id(module): name for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    # the module that calls topk is beside the experts, or around them
    places = {name.rpartition(".")[0]: name for name in blocks}
    watch = _Watch()
    handles = [module.register_forward_pre_hook(watch.begin) for module in modules.values()]
    handles += [module.register_forward_hook(watch.end, always_call=True) for module in modules.values()]
    ids = torch.arange(4, device=next(model.parameters()).device)[None]
    try:
        with torch.no_grad(), watch:
            plain = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    routers: list[_Router] = []
    for block in blocks:
        own = next(weight for weight in modules[block].parameters(recurse=False) if weight.ndim == 3)
        found = [
            (module, calls)
            for module, calls in watch.calls_over(len(own))
            if block in (places.get(names[id(module)]), places.get(names[id(module)].rpartition(".")[0]))
        ]
        if len(found) != 1:
            raise _unwatched(model, f"{block} gets its experts from another function than topk")
        (module, calls), *_ = found
        routers.append(_Router(len(routers), len(calls) - 1, len(own), calls[-1]))
        setattr(module, _MARK, routers[-1])
        module.register_forward_pre_hook(functools.partial(_begin, routers[-1]))
        module.register_forward_hook(_end, always_call=True)
    _check(model, ids, routers, plain)
    return routers


class _Watch(TorchFunctionMode):
    """Notes which module calls `topk`, over how many scores and for how many experts."""

    def __init__(self) -> None:
        super().__init__()
        self._stack: list[torch.nn.Module] = []
        self._calls: list[tuple[torch.nn.Module, int, int]] = []

    def begin(self, module: torch.nn.Module, args: Any) -> None:
        self._stack.append(module)

    def end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk" and args[0].ndim == 2 and self._stack:
            self._calls.append((self._stack[-1], args[0].shape[-1], result.indices.shape[-1]))
        return result

    def calls_over(self, experts: int) -> list[tuple[torch.nn.Module, list[int]]]:
        """The modules that called topk over this number of scores, with the number of results of each call."""
        modules = {id(module): module for module, scores, _ in self._calls if scores == experts}
        return [
            (module, [top for called, scores, top in self._calls if called is module and scores == experts])
            for module in modules.values()
        ]


def _check(model: Any, ids: torch.Tensor, routers: Sequence[_Router], plain: torch.Tensor) -> None:
    """Raise ConfigError unless the model's own experts, prescribed, give its own logits, and others give other logits."""
    own: list[torch.Tensor] = []
    with torch.no_grad():
        with RouterPass(lambda choice: own.append(choice.index_TK)).active():
            model(input_ids=ids, use_cache=False)
        right = len(own) == len(routers)
        if right:
            own_TLK, experts = torch.stack(own, dim=1), routers[0].experts
            others = not torch.equal(_replayed(model, ids, (own_TLK + 1) % experts), plain)
            # all experts are used whatever is prescribed, or all weights are 0
            no_others = experts == routers[0].top_k or not bool(plain.any())
            right = torch.equal(_replayed(model, ids, own_TLK), plain) and (others or no_others)
    if not right:
        for module in model.modules():
            if hasattr(module, _MARK):
                delattr(module, _MARK)
        raise _unwatched(model, "a prescribed choice of experts does not give what the same choice of its own gives")


def _replayed(model: Any, ids: torch.Tensor, replay_TLK: torch.Tensor) -> Any:
    with RouterPass(lambda choice: None, replay_TLK).active():
        return model(input_ids=ids, use_cache=False).logits


def _no_mixture(model: Any) -> ConfigError:
    return ConfigError(
        f"model.router_replay=true: {type(model).__name__} is no mixture of experts: it has no experts that are chosen. Remove "
        f"model.router_replay"
    )


def _unwatched(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} does not choose its experts in a way that can be recorded: {reason}. Set "
        f"model.router_replay=false and loss.router_aux_loss_coef=0"
    )
