"""Code that runs inside vLLM's worker processes: receives weights from files, broadcasts, or memory that the trainer shares.

Started with `--worker-extension-cls`. It is imported in vLLM's environment, where only the source of turnwise is on the path:
no module of turnwise that needs other packages may be imported here. Errors are returned as data, because an exception in a
worker can end the server.

ms-swift's and TRL's trainers send tensors by NCCL through vLLM's communicator: the trainer and this process form a group of
two, and the trainer broadcasts bytes. Who asked for them, and what becomes of them, is not known here.
"""

from __future__ import annotations

import importlib.util
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.engines.remote.shared_buffer import Place, check_part, checksum_of_all, open_buffer
from turnwise.engines.remote.weights import FILES_INSTEAD, WeightShapes, read_shapes

# Weights from turnwise's trainer


class WeightReceiver:
    """Methods that vLLM adds to its worker class, for calls by `/collective_rpc`.

    One trainer at a time, the owner, may change the weights. Its claim ends with `turnwise_release`, or `lease` seconds after
    its last call.
    """

    turnwise_owner: str | None = None
    turnwise_claimed_until: float = 0.0
    turnwise_good: str | None = None
    """The file with the weights that the model has; None: those of the model directory, or of a broadcast."""
    turnwise_received: bool = False
    """Whether the model has the weights of a broadcast, which only the trainer can send again."""
    turnwise_group: Any = None
    """The group of torch.distributed with the trainer; None before `turnwise_join`."""
    turnwise_names: Mapping[str, Sequence[int]] | None = None
    """Names and shapes of the weights of the last successful update."""
    turnwise_buffer: Any = None
    """The memory that the trainer shares; None except during an update."""
    turnwise_loaded: list[Place] | None = None
    """The weights that were loaded from shared memory; None before the first part."""
    turnwise_half: bool = False
    """Whether a load from shared memory has ended before its last part. vLLM keeps what it has of layers that are not complete,
    and would mix it with the weights of the next load."""

    def turnwise_claim(self, owner: str, lease: float) -> dict[str, Any]:
        """Become or stay the owner."""
        if self.turnwise_half:
            return {"error": "the model has only some weights of an update, which was given up", "broken": True}
        now = time.monotonic()
        if self.turnwise_owner not in (None, owner) and now < self.turnwise_claimed_until:
            seconds = self.turnwise_claimed_until - now
            return {
                "error": f"another trainer ({self.turnwise_owner}) owns this server. Two trainers would overwrite each other's "
                f"weights: use another server, stop the other trainer, or wait {seconds:.0f} s if it has died"
            }
        self.turnwise_owner, self.turnwise_claimed_until = owner, now + lease
        return {}

    def turnwise_release(self, owner: str) -> dict[str, Any]:
        """End the claim of this owner."""
        if self.turnwise_owner == owner:
            self.turnwise_owner = None
        return {}

    def turnwise_load(self, owner: str, lease: float, path: str, checksum: str) -> dict[str, Any]:
        """Replace the model's weights by those of a safetensors file.

        Returns `error` if that failed; the model then has its previous weights, or `broken` is true as well.
        """
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused
        started = time.monotonic()
        tensors: dict[str, Any] = {}
        if error := _error_of(lambda: tensors.update(self._turnwise_checked(path, checksum))):
            return {"error": error}
        if error := _error_of(lambda: self._turnwise_replace(tensors)):
            good = self.turnwise_good
            second = _error_of(lambda: self._turnwise_replace(None if good is None else _read(good, None)))
            if second or self.turnwise_received:
                return {"error": f"{error}; the previous weights are not restored: {second}", "broken": True}
            return {"error": error}
        self.turnwise_good, self.turnwise_received = path, False
        self.turnwise_names = {name: list(tensor.shape) for name, tensor in tensors.items()}
        return {"checksum": checksum, "seconds": time.monotonic() - started}

    def turnwise_join(self, owner: str, lease: float, address: dict[str, Any]) -> dict[str, Any]:
        """Join the trainer's group (`weights.GroupAddress`, as a dictionary), after leaving an earlier one."""
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused
        from turnwise.engines.remote.weights import GroupAddress, join, refuse_other_nccl

        def enter() -> None:
            where = GroupAddress(**address)
            refuse_other_nccl(where)
            self._turnwise_leave()
            self.turnwise_group = join(where, 1 + self.rank)  # type: ignore[attr-defined]

        error = _error_of(enter)
        return {"error": f"the worker could not join the trainer's group: {error}"} if error else {}

    def turnwise_expect(self, owner: str, lease: float, weights: list[list[Any]]) -> dict[str, Any]:
        """Whether weights with these names, dtypes and shapes can be received. Nothing is sent before."""
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused
        error = _error_of(lambda: self._turnwise_compare_names({name: list(shape) for name, _, shape in weights}))
        return {"error": error} if error else {}

    def turnwise_receive(self, weights: list[list[Any]], checksum: str, backend: str) -> dict[str, Any]:
        """Receive weights [name, dtype, shape], in this order, and replace the model's weights by them.

        Returns `error` if that failed. With `broken`, the model may have some of the new weights.
        """
        started = time.monotonic()
        tensors: dict[str, Any] = {}
        if error := _error_of(lambda: tensors.update(_receive(self.turnwise_group, weights, backend))):
            _error_of(self._turnwise_leave)
            return {"error": error}
        if error := _error_of(lambda: _check_values(tensors, checksum)):
            return {"error": error}
        if error := _error_of(lambda: self._turnwise_replace(tensors)):
            return {"error": error, "broken": True}
        self.turnwise_good, self.turnwise_received = None, True
        self.turnwise_names = {name: list(tensor.shape) for name, tensor in tensors.items()}
        return {"checksum": checksum, "seconds": time.monotonic() - started}

    def turnwise_open(self, owner: str, lease: float, handles: list[dict[str, Any]]) -> dict[str, Any]:
        """Open memory that the trainer shares: each worker by a handle of its own (`SharedBuffer.handle`)."""
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused

        def enter() -> None:
            self.turnwise_buffer = open_buffer(handles[self.rank])  # type: ignore[attr-defined]

        error = _error_of(enter)
        return {"error": f"the worker could not open the trainer's memory: {error}; {FILES_INSTEAD}"} if error else {}

    def turnwise_part(
        self, owner: str, lease: float, places: list[dict[str, Any]], load: bool, last: bool
    ) -> dict[str, Any]:
        """Check the weights at these places of the shared memory, and with `load`, load them into the model.

        Returns `error` if that failed. With `broken`, the model may have some of the new weights. The answer to the `last` part
        that is loaded has the checksum of all.
        """
        refused = self.turnwise_claim(owner, lease)
        if refused:
            return refused
        part = [Place(**place) for place in places]
        tensors: dict[str, Any] = {}

        def read() -> None:
            # copies: vLLM keeps the weights of a layer until the layer is complete, and the next part takes their place
            tensors.update({place.name: place.of(self.turnwise_buffer).clone() for place in part})
            check_part(part, tensors)

        error = _error_of(read)
        if not error and load:
            error = _error_of(lambda: self._turnwise_load_part(tensors, last=last))
        if error:
            self.turnwise_half = self.turnwise_loaded is not None
            return {"error": error, "broken": self.turnwise_half}
        if not load:
            return {}
        assert self.turnwise_loaded is not None
        self.turnwise_loaded += part
        if not last:
            return {}
        loaded, self.turnwise_loaded = self.turnwise_loaded, None
        self.turnwise_good, self.turnwise_received = None, True
        self.turnwise_names = {place.name: place.shape for place in loaded}
        return {"checksum": checksum_of_all({place.name: place.checksum for place in loaded})}

    def turnwise_close(self, owner: str) -> dict[str, Any]:
        """Close the shared memory: only then can the trainer free it."""
        if self.turnwise_owner == owner:
            self.turnwise_buffer = None
            self.turnwise_half |= self.turnwise_loaded is not None
        return {}

    def _turnwise_load_part(self, tensors: dict[str, Any], *, last: bool) -> None:
        """Load weights into the model as vLLM's own `IPCWeightTransferEngine` does: the first part begins the load of all layers,
        the last one ends it."""
        import torch
        from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
        from vllm.model_executor.model_loader.mtp_validation import (  # type: ignore[import-not-found]
            disable_mtp_completeness_check,
        )
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with torch.no_grad(), set_current_vllm_config(runner.vllm_config), disable_mtp_completeness_check():
            if self.turnwise_loaded is None:
                self.turnwise_loaded = []
                _pack_experts_again(model)
                initialize_layerwise_reload(model)
            model.load_weights(iter(tensors.items()))
            if last:
                finalize_layerwise_reload(model, runner.model_config)
                _pack_tied_output_layers(model)
                for name in ("reset_encoder_cache", "reset_mm_cache"):
                    getattr(runner, name)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _turnwise_leave(self) -> None:
        group, self.turnwise_group = self.turnwise_group, None
        if group is not None:
            from turnwise.engines.remote.weights import leave

            leave(group)

    def _turnwise_checked(self, path: str, checksum: str) -> dict[str, Any]:
        """The tensors of a file. Raises ValueError or EngineError unless they are all finite weights of the model."""
        tensors = _read(path, checksum)
        self._turnwise_compare_names({name: list(tensor.shape) for name, tensor in tensors.items()})
        _check_finite(tensors)
        return tensors

    def _turnwise_compare_names(self, given: dict[str, list[int]]) -> None:
        """Raise EngineError unless these are the names and shapes of all weights of the model."""
        known = self.turnwise_names
        if known is None:
            folder = Path(self.model_runner.vllm_config.model_config.model)  # type: ignore[attr-defined]
            known = read_shapes(sorted(folder.glob("*.safetensors"))).shapes
        if known:  # the model directory has safetensors files
            WeightShapes(known).check(given)

    def _turnwise_replace(self, tensors: dict[str, Any] | None) -> None:
        """Load weights into the model; None: those of the model directory."""
        import torch

        with torch.no_grad():
            _pack_experts_again(self.model_runner.get_model())  # type: ignore[attr-defined]
            # the worker's own method: it sets vLLM's configuration, which some layers ask for while they process weights
            self.reload_weights(weights_iterator=None if tensors is None else iter(tensors.items()))  # type: ignore[attr-defined]
            _pack_tied_output_layers(self.model_runner.get_model())  # type: ignore[attr-defined]


def _read(path: str, checksum: str | None) -> dict[str, Any]:
    """The tensors of a file. Raises ValueError if its contents are not those of the checksum."""
    from safetensors.torch import load

    content = Path(path).read_bytes()
    found = f"{zlib.crc32(content):08x}"
    if checksum is not None and found != checksum:
        raise ValueError(f"the checksum of {path} is {found} here, and {checksum} where it was written")
    return load(content)


def _error_of(action: Callable[[], object]) -> str:
    """Run an action. The text of its error; empty if there was none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _receive(group: Any, weights: list[list[Any]], backend: str) -> dict[str, Any]:
    """The tensors that the trainer broadcasts, on the CPU. Raises RuntimeError if the trainer is lost."""
    import torch

    if group is None:
        raise ValueError("the worker is in no group with the trainer")
    made = ((name, getattr(torch, dtype), shape) for name, dtype, shape in weights)
    if backend == "gloo":
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in made}
        for work in [group.broadcast(tensor, 0) for tensor in tensors.values()]:
            work.wait()
        return tensors
    # one tensor at a time on the GPU, which the model and its KV cache fill
    device, received = torch.device("cuda", torch.cuda.current_device()), dict[str, Any]()
    for name, dtype, shape in made:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        group.broadcast(tensor, 0).wait()
        received[name] = tensor.cpu()
    return received


def _check_values(tensors: dict[str, Any], checksum: str) -> None:
    """Raise ValueError unless all values are finite and the bytes of all tensors are those of the checksum."""
    from turnwise.engines.remote.weights import checksum_of_tensors

    found = checksum_of_tensors(tensors.values())
    if found != checksum:
        raise ValueError(f"the checksum of the received weights is {found}, and {checksum} where they were sent")
    _check_finite(tensors)


def _check_finite(tensors: dict[str, Any]) -> None:
    """Raise ValueError for NaN or infinite values. In one thread, which vLLM's workers have, `isfinite` reads 0.3 GB a second,
    and the search for the least and the greatest value 10: both are NaN if one value is."""
    import torch

    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise ValueError(f"the weight {name} has values that are not finite")


def _pack_experts_again(model: Any) -> None:
    """Let the CPU backend pack the weights of experts in the next load as in the first one.

    It packs them when the kernel of a layer is made. With a kernel, vLLM 0.32 copies the weights of an update without packing
    into the place of the packed ones.
    """
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # type: ignore[import-not-found]
        UnquantizedFusedMoEMethod,
    )

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _pack_tied_output_layers(model: Any) -> None:
    """Renew what the CPU backend derives from an output layer that is tied to the embedding.

    With tie_word_embeddings, the checkpoint has no tensor of the output layer, so vLLM does not process the layer again, and
    its packed copy of the old weights would stay in use.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


# Tensors from trainers of ms-swift and TRL


class SwiftTrainerGroup(Protocol):
    """The trainer and this process, as the two members of a group."""

    def receive(self, count: int, dtype: str) -> Any:
        """The tensor of `count` numbers that the trainer broadcasts next, as uint8 on the CPU: [count * bytes of a number]."""
        ...


JoinGroup = Callable[[str, int], SwiftTrainerGroup]
"""Joins a trainer's group at an address and a port of this machine. Waits for the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor is in the bytes of a broadcast."""

    name: str
    dtype: str
    """The name of a type of torch, such as `bfloat16`."""
    shape: Sequence[int]
    start: int
    """The first byte."""
    end: int
    """The byte after the last."""


def split_tensors(bytes_N: Any, places: Sequence[TensorPlace]) -> dict[str, Any]:
    """Copies of the tensors in the bytes of a broadcast, by their names."""
    import torch

    return {
        place.name: bytes_N[place.start : place.end]
        .clone()
        .view(getattr(torch, place.dtype))
        .reshape(tuple(place.shape))
        for place in places
    }


def join_by_nccl() -> JoinGroup | None:
    """How this process joins a trainer's group; None if the package vllm is not installed here, or there is no GPU."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import torch

    return _NcclGroup if torch.cuda.is_available() else None


class _NcclGroup:
    """A group on GPUs: this process has rank 0, and the trainer has rank 1."""

    def __init__(self, host: str, port: int) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
            PyNcclCommunicator,
        )
        from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore[reportMissingImports]

        self._device = torch.device("cuda", torch.cuda.current_device())
        group = StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=2)
        self._communicator: Any = PyNcclCommunicator(group, device=self._device)
        if self._communicator.disabled:
            raise RuntimeError("vLLM's communicator found no NCCL library on this machine")

    def receive(self, count: int, dtype: str) -> Any:
        """See `SwiftTrainerGroup.receive`."""
        import torch

        numbers_N = torch.empty(count, dtype=getattr(torch, dtype), device=self._device)
        self._communicator.broadcast(numbers_N, src=1, stream=torch.cuda.current_stream(self._device))
        torch.cuda.synchronize(self._device)
        self._communicator.group.barrier()  # the trainer waits for it after each broadcast
        return numbers_N.view(torch.uint8).cpu()
