"""A CUDA device that is not there: tensors that say they are on `cuda:0` and compute on the CPU, and what they would cost.

torch's own fake tensors record no gradients for a device that the build of torch does not support. Here a tensor is a subclass
that keeps its values in the CPU's memory. A tensor of the device and one of the host in the same operation is an error on a real
GPU; here, it is noted in `Traffic.mixed`. Copies between the two, and operations after which the host waits for the device, are
counted. Kernels that only CUDA has, several devices, and memory are not imitated: those of bitsandbytes (weights in 4 bits) are
the CPU's.
"""

from __future__ import annotations

import copy
import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_DEVICE = torch.device("cuda", 0)
_WAITING = {"nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal", "_local_scalar_dense"}
_WAITING |= {"is_nonzero", "repeat_interleave"}
"""Operations whose result has a size or a value that the host must know."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


@dataclass
class Traffic:
    """What operations on the device would cost, since the last `clear`."""

    to_device: Counter[str] = field(default_factory=Counter)
    """Copies from the host, by the line of code that asked for them."""
    to_host: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Other operations after which the host waits for the device."""
    mixed: Counter[str] = field(default_factory=Counter)
    """Operations on tensors of both, which a GPU refuses."""
    operations: int = 0
    """All operations but views and new memory, one for an operation on a list of tensors: about as many kernels are started."""

    def clear(self) -> None:
        """Count from 0."""
        for counter in (self.to_device, self.to_host, self.waits, self.mixed):
            counter.clear()
        self.operations = 0

    def totals(self) -> tuple[int, int, int]:
        """Copies to the device, copies to the host, and other waits."""
        return self.to_device.total(), self.to_host.total(), self.waits.total()


_traffic = Traffic()


class _OnDevice(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        return _make_subclass(cls, values, values.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: _DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **options: Any) -> str:
        return f"device tensor {tuple(self.shape)}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _values(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = _placed(_values(self).clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                memo[id(self)]._is_param = True
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        _note(name, args, [one for one in tensors if not isinstance(one, cls)])
        if func.namespace == "bitsandbytes":  # written in Python, and asks its arguments for their device
            args, kwargs = tree_map(lambda leaf: _values(leaf) if isinstance(leaf, cls) else leaf, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            if name == "histc" and not args[0].is_floating_point():  # of whole numbers on CUDA only
                result = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
            else:
                result = func(*args, **kwargs)
        _traffic.operations += not func.is_view and not name.startswith("empty")
        if name == "copy_" and not isinstance(args[0], cls):
            return args[0]
        return tree_map(_placed, result)


_make_subclass = torch.Tensor._make_subclass


@functools.cache
def _also_on_device(kind: type) -> type:
    """Tensors of this class that are on the device."""
    return type(kind)(f"{kind.__name__}OnDevice", (kind, _OnDevice), {})


def _make_subclass_there(kind: Any, values: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """`Tensor._make_subclass`, with which classes such as bitsandbytes' `Params4bit` make their tensors."""
    if isinstance(values, _OnDevice) and not issubclass(kind, _OnDevice):
        kind, values = _also_on_device(kind), _values(values)
    return _make_subclass(kind, values, *options, **named)


def _note(name: str, args: tuple[Any, ...], host: list[torch.Tensor]) -> None:
    """Count an operation, of which the tensors `host` are on the host."""
    if name == "copy_" and host:
        (_traffic.to_device if isinstance(args[0], _OnDevice) else _traffic.to_host)[_place()] += 1
    elif host and name in _INDEXING:
        _traffic.to_device[_place()] += 1
    elif host and (
        "fused_adam" in name or any(one.dim() for one in host)
    ):  # a number of the host is an argument of a kernel
        shapes = [tuple(one.shape) for one in host]
        _traffic.mixed[f"{name} with host tensors {shapes}: {_place()}"] += 1
    by_condition = name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
    if name in _WAITING or by_condition:
        _traffic.waits[f"{name}: {_place()}"] += 1


def _place() -> str:
    """The line of turnwise that asked for an operation, or of the library that turnwise called in the backward pass."""
    frames: list[tuple[str, int]] = []
    frame = sys._getframe(2)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    for library in ("/turnwise/", "/transformers/", "/torch/"):
        for file, line in frames:
            if library in file:
                return f"{file.split(library)[-1]}:{line} {linecache.getline(file, line).strip()}"
    return "a test"


def _values(tensor: Any) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().as_subclass(torch.Tensor)


def _placed(value: Any) -> Any:
    return _OnDevice(value) if isinstance(value, torch.Tensor) and not isinstance(value, _OnDevice) else value


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Functions(TorchFunctionMode):
    """Calls that name the device, or that bring values to the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (own := _OWN.get(getattr(func, "__name__", ""))) is not None and args and isinstance(args[0], torch.Tensor):
            return own(func, args, kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
            name = getattr(func, "__name__", "")
            if name in ("tensor", "as_tensor", "scalar_tensor"):
                if args and isinstance(args[0], _OnDevice):
                    return args[0]
                _traffic.to_device[_place()] += 1
            return tree_map(_placed, func(*args, **kwargs))
        return func(*args, **kwargs)


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.to`, with the device, the dtype or another tensor as an argument."""
    tensor, *rest = args
    device, dtype, copy = kwargs.get("device"), kwargs.get("dtype"), kwargs.get("copy", False)
    for value in rest:
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.device | str):
            device = value
    dtype = dtype or tensor.dtype
    if device is None or _is_cuda(device) == isinstance(tensor, _OnDevice):
        return func(tensor, dtype, copy=copy)
    if _is_cuda(device):
        _traffic.to_device[_place()] += 1
        return _OnDevice(tensor.detach().to(dtype, copy=True))
    _traffic.to_host[_place()] += 1
    return _values(tensor).to(dtype, copy=True)


def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _to(torch.Tensor.to, (args[0], "cpu"), {})


def _tolist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], _OnDevice):
        _traffic.to_host[_place()] += 1
        return _values(args[0]).tolist()
    return func(*args, **kwargs)


def _numpy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], _OnDevice):
        _traffic.mixed[f"numpy: {_place()}"] += 1
        return _values(args[0]).numpy()
    return func(*args, **kwargs)


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _Functions():  # functions of the backward pass may make tensors on the device
        return torch.autograd.backward(args[0], kwargs.get("gradient"))


_OWN: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "to": _to,
    "cpu": _cpu,
    "tolist": _tolist,
    "numpy": _numpy,
    "__array__": _numpy,
    "backward": _backward,
}


def _method(name: str) -> Any:
    plain = getattr(torch.Tensor, name)
    return lambda self, *args, **kwargs: _OWN[name](plain, (self, *args), kwargs)


for _name in ("to", "cpu", "tolist", "numpy"):  # also outside of the context, such as in a thread of a library
    setattr(_OnDevice, _name, _method(_name))


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the host on the device, with its own gradient; a parameter if the tensor is one. Weights in 4 bits
    keep their scales, which are copied too."""
    if hasattr(tensor, "quant_state"):
        return copy.deepcopy(tensor).to("cuda")
    placed = _OnDevice(tensor.detach().clone()).requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        placed._is_param = True  # type: ignore[attr-defined]
    return placed


def _model_to(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.to`: the same parameter in two modules stays one."""
    if not (args and isinstance(args[0], str | torch.device) and _is_cuda(args[0])):
        return _plain_to(model, *args, **kwargs)
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, _OnDevice):
                    tensors[name] = placed.setdefault(id(tensor), on_device(tensor))
    return model


_plain_to = transformers.PreTrainedModel.to
_autocast, _enabled, _dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
_submit, _Generator = ThreadPoolExecutor.submit, torch.Generator


def _submit_inside(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        with _Functions():
            return work(*args, **kwargs)

    return _submit(pool, run)


@contextmanager
def fake_cuda() -> Iterator[Traffic]:
    """Inside, `cuda` is a device, in this thread and in those of thread pools."""
    _traffic.clear()
    replaced = {
        # the values are on the CPU, where the autocast of CUDA has no effect
        "autocast": lambda device_type, *args, **kwargs: _autocast("cpu", *args, **kwargs),
        "is_autocast_enabled": lambda device_type="cpu": _enabled("cpu"),
        "get_autocast_dtype": lambda device_type: _dtype("cpu"),
        "Generator": lambda device="cpu": _Generator("cpu"),
    }
    with (
        mock.patch.multiple(torch, **replaced),
        mock.patch.object(transformers.PreTrainedModel, "to", _model_to),
        mock.patch.object(transformers.modeling_utils, "caching_allocator_warmup"),
        mock.patch.object(torch.Tensor, "_make_subclass", _make_subclass_there),
        mock.patch.object(ThreadPoolExecutor, "submit", _submit_inside),
        _Functions(),
    ):
        # modules get new parameters when they are moved: the present ones are of another class
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield _traffic
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
