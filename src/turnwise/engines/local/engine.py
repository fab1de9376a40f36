"""The embedded engine: samples with the trainer's own model, in the trainer's process, for many conversations at once.

Knows the event loop: `generate` puts a request into the queue and waits, and one task runs `EngineCore.step` as long as there
are requests. Everything runs in the thread of the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.engines.engine import CopiedWeights, SharedWeights, WeightPublisher, WeightSource
from turnwise.engines.local.cache import KVCache, PrefixCache, RouteShape
from turnwise.engines.local.forward import VisionForward, VisionPrompt, choose_forward
from turnwise.engines.local.scheduler import EngineCore, PendingRequest, RequestLimits, RunningBatch, Stats
from turnwise.engines.remote.weights import refuse_weights
from turnwise.errors import EngineError
from turnwise.models.allocator import is_large
from turnwise.models.cpu import TorchThreads
from turnwise.models.experts import Routers
from turnwise.models.grammar import Matcher, TokenMasks
from turnwise.models.loading import published_weights
from turnwise.models.lora import has_adapter
from turnwise.models.precision import autocast as bfloat16_autocast
from turnwise.models.precision import overflowing_module
from turnwise.options.engines import LocalEngineSection
from turnwise.types import Completion, Request

MAX_YIELDS = 16
"""How often the event loop runs, at most, between two steps after a request has finished: its conversation may come back
with the next request, which then joins the next step."""
DEFAULT_CACHE_GB = 2.0
"""The memory of the KV cache in GiB where none is given. A run that trains on a GPU computes what it leaves free, and gives the
number (`doctor/fit.py`)."""
LARGE_CACHE = 2**28
"""Bytes of a KV cache that is freed during training. It takes longer to make a smaller cache again than it is worth."""
QUIET_YIELDS = 3
"""No request in so many runs of the event loop: the next step begins."""
_DEFAULTS = LocalEngineSection()


class LocalEngine:
    """An `Engine` over a model in this process.

    `slots` is the number of conversations in the cache, `memory_gb` the memory budget of the cache, which starts small and
    grows. `context` is the largest number of tokens in a conversation (None: the model's maximum). `decode` turns token ids
    into text, which requests with stop texts need. `threads=0` measures how many torch threads are fastest; a fixed number
    makes runs repeatable. With `autocast`, the parameters of the model are float32, and matrix products and the KV cache are
    bfloat16; the engine then keeps bfloat16 copies of the weights of linear layers. With `record_routes`, completions have the
    experts that a mixture of experts has chosen for each token (`Completion.routes`). `masks` compiles the grammars of requests
    with a constraint, for the model's tokenizer.

    Raises EngineError if the model cannot be run, and ConfigError if its experts are to be recorded and cannot be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = _DEFAULTS.slots,
        memory_gb: float | None = _DEFAULTS.memory_gb,
        context: int | None = None,
        threads: int = _DEFAULTS.threads,
        decode: Callable[[Sequence[int]], str] | None = None,
        version: int = 0,
        autocast: bool = False,
        record_routes: bool = False,
        masks: TokenMasks | None = None,
    ) -> None:
        routers = Routers.required(model) if record_routes else None  # before the model is copied for autocast
        parameter = next(model.parameters())
        forward = choose_forward(model, autocast=autocast)
        context = _context(model, context)
        if memory_gb is None:
            memory_gb = DEFAULT_CACHE_GB
        kv = KVCache(
            forward.kv_shapes,
            forward.state_shapes,
            dtype=forward.kv_dtype,
            device=parameter.device,
            budget_bytes=int(memory_gb * 2**30),
            routes=None if routers is None else RouteShape(routers.layers, routers.top_k, routers.experts),
        )
        if kv.max_capacity() < 2:
            raise EngineError(
                f"engine.memory_gb is {memory_gb:.3g}, and the recurrent states of one conversation of {type(model).__name__} "
                f"take {kv.row_bytes / 2**30:.3g} GiB: give the cache more"
            )
        self._models, self._autocast, self._masks = [model], autocast, masks
        self._core = EngineCore(
            forward,
            PrefixCache(kv, num_slots=slots, context=context),
            RunningBatch(slots, decode, parameter.device),
            threads=TorchThreads(threads, large=is_large(model)),
            version=version,
            explain=self._explain_overflow,
        )
        self._limits = RequestLimits(
            context=context,
            vocab_size=model.config.get_text_config().vocab_size,
            cache_tokens=kv.max_capacity(),
            token_bytes=kv.token_bytes,
            row_bytes=kv.row_bytes,
            can_decode=decode is not None,
        )
        self._requests: set[PendingRequest] = set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def version(self) -> int:
        """The version of the weights that new tokens are sampled with."""
        return self._core.versions[0]

    @property
    def context(self) -> int:
        """The most tokens of a conversation."""
        return self._limits.context

    @property
    def constrains(self) -> bool:
        """Whether it samples under grammars."""
        return self._masks is not None

    @property
    def continues_forms(self) -> bool:
        """Whether it does so behind the beginning of a turn."""
        return self.constrains

    @property
    def stats(self) -> Stats:
        """Counters since the engine was created."""
        self._core.stats.evictions = self._core.cache.evictions
        return self._core.stats

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache takes now."""
        return self._core.cache.kv.bytes

    async def start(self) -> None:
        pass

    async def generate(self, request: Request) -> Completion:
        """Continue `request.token_ids`; cancelling the call frees its row at once.

        Raises EngineError if the engine is closed, the model fails, or the request can never be served.
        """
        return await self._generate(request, 0)

    def with_model(self, model: PreTrainedModel, version: int) -> SecondModel | None:
        """An engine for a second model with the same base weights, whose requests are in the same batches and which shares the
        cache; None if they cannot be. `version` is the number of its weights."""
        if self._requests or not self._core.forward.add_model(model):
            return None
        self._models.append(model)
        self._core.versions.append(version)
        return SecondModel(self, len(self._models) - 1)

    async def _generate(self, request: Request, model: int) -> Completion:
        """`generate`, by the model with this number."""
        if self._closed:
            raise EngineError("the engine is closed: create a new LocalEngine, or generate before close()")
        pending = self._prepare(request, model)
        self._start()
        self._requests.add(pending)
        self._core.add(pending)
        try:
            return await pending.future
        finally:
            self._requests.discard(pending)
            self._core.abort(pending)

    def release(self, conversation: str) -> None:
        """The conversation is over: its slot may be overwritten, and serves as a source of prefixes until then."""
        self._core.cache.release(conversation)

    def free_cache(self) -> None:
        """Free what is of no use after the next update of the weights, unless a request is running: the memory of a large KV
        cache, and copies of weights. Later requests start with an empty cache."""
        if self._requests:
            return
        self._core.forward.free_copies()
        if self.cache_bytes >= LARGE_CACHE:
            self._core.reset()  # and returns all free memory to the system

    async def load_weights(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Sample with these weights from now on. Nothing that was computed with earlier weights is continued or copied.

        Running requests go on with their own keys and values, and their next tokens carry the new version. The weights of a
        model without an adapter are the base of all models of the engine: all of them are changed, and have the new version.
        Raises EngineError, before anything is changed, if names or shapes are not those of the model.
        """
        self._load(version, weights, 0)

    def _load(self, version: int, weights: Mapping[str, torch.Tensor] | None, model: int) -> None:
        """`load_weights` for the model with this number."""
        if weights is not None:
            _copy_weights(self._models[model], weights)
        changed = [model] if has_adapter(self._models[model]) else range(len(self._models))
        for number in changed:
            self._core.use_weights(version, number)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        """Nothing is copied if the learner changes the parameters of this engine's model."""
        model = self._models[0]
        if learner.trains(model):
            return SharedWeights(self, self.free_cache)
        return CopiedWeights(self, lambda: learner.copy_weights(model), self.free_cache)

    async def close(self) -> None:
        """Free the cache. Running requests fail with EngineError."""
        self._closed = True
        self._fail_all("the engine was closed while the request was running")
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.cancel()
        self._task = None

    def _prepare(self, request: Request, model: int) -> PendingRequest:
        """Check that the request can be served."""
        prompt_N = np.asarray(request.token_ids, dtype=np.int32)
        max_tokens = self._limits.max_tokens(prompt_N, request.sampling)
        vision_prompt = self._vision_prompt(prompt_N, request)
        return PendingRequest(
            request=request,
            prompt_N=prompt_N if vision_prompt is None else vision_prompt.keys_N,
            vision_prompt=vision_prompt,
            max_tokens=max_tokens,
            matcher=self._matcher(request),
            routes=request.routes if self._core.cache.kv.routes is not None else None,
            future=asyncio.get_running_loop().create_future(),
            model=model,
        )

    def _matcher(self, request: Request) -> Matcher | None:
        """The state of the request's grammar."""
        if request.constraint is None:
            return None
        if self._masks is None:
            raise EngineError(
                "the request has a constraint: create the engine with LocalEngine(..., masks=TokenMasks(tokenizer))"
            )
        return self._masks.matcher(request.constraint)

    def _vision_prompt(self, prompt_N: np.ndarray, request: Request) -> VisionPrompt | None:
        if not request.media:
            return None
        if not isinstance(self._core.forward, VisionForward):
            raise EngineError(
                f"the request contains {len(request.media)} images or videos, and {type(self._models[0]).__name__} does not "
                f"accept them. Use a vision model, or messages of text"
            )
        return self._core.forward.make_prompt(prompt_N, request.media)

    def _explain_overflow(self, tokens_N: np.ndarray, request: PendingRequest) -> str:
        """Why the logits after these tokens are NaN or infinite."""
        where, model = None, self._models[request.model]
        if request.vision_prompt is None:
            ids_1T = torch.from_numpy(tokens_N.astype(np.int64)).to(next(model.parameters()).device)[None]
            with bfloat16_autocast(ids_1T.device, self._autocast):
                where = overflowing_module(model, lambda: model(input_ids=ids_1T, use_cache=False))
        return (
            f"{type(model).__name__} gives NaN or infinite logits after {len(tokens_N)} tokens"
            f"{'' if where is None else f', first in {where}'}: the weights may have diverged (lower train.lr, or go back to an "
            f"earlier checkpoint), or the model's dtype is too narrow for it (model.dtype)"
        )

    # the task that runs the steps

    def _start(self) -> None:
        """Make sure that the task runs, in this event loop."""
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is not loop:
            self._task = None
            if self._requests:
                self._fail_all("the event loop of the request has ended")
        if self._task is None or self._task.done():
            self._core.read_weights()
            self._task = loop.create_task(self._run())

    async def _run(self) -> None:
        """Run steps until there are no requests."""
        finished = True
        while True:
            try:
                await self._yield(MAX_YIELDS if finished else 1)
            except asyncio.CancelledError:
                self._set_exceptions("the engine's stepping task was cancelled")
                raise
            if not self._requests:
                return
            finished = False
            try:
                finished = self._core.step() > 0
            except Exception as error:  # whatever the model raises: the requests fail, the engine goes on
                self._fail_all(f"the embedded engine could not make a step: {type(error).__name__}: {error}", error)

    async def _yield(self, times: int) -> None:
        """Let conversations run, up to `times` runs of the event loop, fewer if no new request arrives."""
        waiting, quiet = self._core.scheduler.waiting, 0
        for _ in range(times):
            before = len(waiting)
            await asyncio.sleep(0)
            quiet = 0 if len(waiting) > before else quiet + 1
            if quiet == QUIET_YIELDS:
                break

    def _fail_all(self, message: str, cause: Exception | None = None) -> None:
        """Fail all requests and clear the cache, whose contents cannot be trusted any more."""
        self._set_exceptions(message, cause)
        self._requests.clear()
        self._core.reset()

    def _set_exceptions(self, message: str, cause: Exception | None = None) -> None:
        for request in self._requests:
            if not request.future.done() and not request.future.get_loop().is_closed():
                error = EngineError(message)
                error.__cause__ = cause
                request.future.set_exception(error)


class SecondModel:
    """An `Engine` over a further model of a `LocalEngine`, with the same base weights (`LocalEngine.with_model`)."""

    def __init__(self, engine: LocalEngine, model: int) -> None:
        self._engine, self._number = engine, model
        self._closed = False

    @property
    def version(self) -> int:
        """The version of the weights that new tokens are sampled with."""
        return self._engine._core.versions[self._number]

    @property
    def context(self) -> int:
        """The most tokens of a conversation."""
        return self._engine.context

    @property
    def constrains(self) -> bool:
        """Whether it samples under grammars."""
        return self._engine.constrains

    @property
    def continues_forms(self) -> bool:
        """Whether it does so behind the beginning of a turn."""
        return self._engine.continues_forms

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, request: Request) -> Completion:
        """See `LocalEngine.generate`."""
        if self._closed:
            raise EngineError("the engine of the second model is closed: generate before close()")
        return await self._engine._generate(request, self._number)

    def release(self, conversation: str) -> None:
        """See `LocalEngine.release`."""
        self._engine.release(conversation)

    async def load_weights(self, version: int, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """See `LocalEngine.load_weights`."""
        self._engine._load(version, weights, self._number)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        """See `LocalEngine.publisher`."""
        model = self._engine._models[self._number]
        if learner.trains(model):
            return SharedWeights(self, self._engine.free_cache)
        return CopiedWeights(self, lambda: learner.copy_weights(model), self._engine.free_cache)

    async def close(self) -> None:
        """Refuse further requests. The memory is the first model's."""
        self._closed = True


def _context(model: PreTrainedModel, context: int | None) -> int:
    """The largest number of tokens in a conversation: `context`, or the number of positions that the model knows."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None and positions is None:
        raise EngineError(
            f"the config of {type(model).__name__} names no longest context (max_position_embeddings): set limits.context"
        )
    if context is not None and not 1 < context <= (positions or context):
        raise EngineError(f"context is {context}; it must be 2 to {positions}, the positions that the model knows")
    return context or positions or 0


def _named_tensors(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors by parameter name. Accepts the names of checkpoint files too, which differ for some models.

    Raises EngineError if tensors of checkpoint files are not parts of the model's own.
    """
    own = model.state_dict(keep_vars=True)
    if has_adapter(model) or own.keys() >= weights.keys():
        return own
    storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
    published = published_weights(model)
    if len(weights.keys() - published.keys()) >= len(weights.keys() - own.keys()):
        return own  # names of neither kind: the error is about the model's own names
    copies = [name for name, tensor in published.items() if tensor.untyped_storage().data_ptr() not in storages]
    if copies:
        raise EngineError(
            f"the embedded engine cannot take the weights of {type(model).__name__} from another process, because "
            f"{copies[0]} is computed from the model's tensors: use engine.name=vllm, or train in one process"
        )
    return published


def _copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names: those of the model, or those of its checkpoint files."""
    own = _named_tensors(model, weights)
    unknown = sorted(set(weights) - set(own))
    # of tied weights, one name is enough
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = sorted(name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in given)
    shapes = [name for name, tensor in weights.items() if name in own and own[name].shape != tensor.shape]
    rule = "load_weights takes the entire state dict of the same model, or None if the model was changed in place"
    refuse_weights(missing, unknown, shapes, rule=rule)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
