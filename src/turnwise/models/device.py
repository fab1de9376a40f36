"""The device of a model: whether it is a GPU, the data type of the model there, its free memory, and why no GPU is used.

Torch is asked, and imported, only if this machine has a driver of a GPU, or if torch is there already: on other machines the
answers take no time. Knows the options of the device. Does not know models.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnwise.options.schema import Config

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""What the drivers of NVIDIA, of Windows' Linux and of AMD make."""
_BFLOAT16_SINCE = (8, 0)
"""The compute capability of the first NVIDIA GPUs with products in bfloat16 (Ampere). Older ones compute them in float32."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_driver() -> bool:
    """Whether this machine has the driver of a GPU."""
    return any(path.exists() for path in _DRIVERS)


def sees_gpu() -> bool:
    """Whether torch can use a GPU of this machine."""
    if "torch" not in sys.modules and not has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def uses_gpu(device: str) -> bool:
    """Whether `model.device` is a GPU: `auto` is one if there is one that torch can use."""
    return device.startswith("cuda") or (device == "auto" and sees_gpu())


def device_name(device: str) -> str:
    """The device of torch for `model.device`."""
    return ("cuda" if sees_gpu() else "cpu") if device == "auto" else device


def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has products in bfloat16 (AVX-512 BF16 or AMX); also if torch does not know."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def default_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """The data type of parameters on a device: bfloat16 on a GPU that computes products in it, else float32."""
    if not uses_gpu(device):
        return "float32"
    if sees_gpu():
        import torch

        # AMD's GPUs have other numbers, and all that torch supports compute in bfloat16
        old = torch.version.hip is None and torch.cuda.get_device_capability(gpu_number(device)) < _BFLOAT16_SINCE
        return "float32" if old else "bfloat16"
    return "bfloat16"


def without_cudnn_attention() -> None:
    """Let torch choose its flash kernel for attention: on an H100 it prefers cuDNN's, which makes a plan of some 60 ms for each
    new pair of batch size and length, in each thread. Here nearly every pass has new ones."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def gpu_number(device: str) -> int:
    """The number of the visible GPU that `model.device` names: 1 for `cuda:1`, 0 without a number."""
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def known_dtype(config: Config) -> Literal["float32", "bfloat16"]:
    """The data type of the model's parameters: that of the device, if the recipe leaves it open.

    Ranks get float32: the process that reads the recipe may see other GPUs than they do, and all must have the same.
    """
    model = config.model
    if model.dtype != "auto":
        return model.dtype
    exact = config.deterministic or model.autocast or config.cluster.distributed
    return "float32" if exact else default_dtype(model.device)


def slow_products(config: Config) -> str | None:
    """What to set where a GPU that computes products in bfloat16 is to compute them in float32; None if it is not."""
    half = config.cluster.fsdp.param_dtype is not None
    if config.deterministic or config.model.autocast or half or known_dtype(config) != "float32" or not sees_gpu():
        return None
    if default_dtype(config.model.device) != "bfloat16":
        return None
    options = "cluster.fsdp.param_dtype=bfloat16" if config.cluster.distributed else "model.autocast=true"
    return (
        f"the GPU computes products in float32, which takes several times as long as in bfloat16: set {options} (float32 "
        f"weights) or model.dtype=bfloat16"
    )


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU (or of a slice of one, with MIG), in bytes."""

    name: str
    total: int
    free: int
    """What this process may use: free memory, and what its allocator already keeps."""

    @property
    def taken(self) -> int:
        """What other processes use, and this one outside of torch's allocator."""
        return self.total - self.free

    def __str__(self) -> str:
        text = f"{self.name} with {self.total / 2**30:.1f} GiB"
        return f"{text}, of which other processes use {self.taken / 2**30:.1f}" if self.taken > 2**30 else text


def gpu_memory(device: str) -> GpuMemory:
    """The memory of the GPU that `model.device` names. Raises RuntimeError if torch cannot use it."""
    import torch

    number = gpu_number(device)
    free, total = torch.cuda.mem_get_info(number)
    name = torch.cuda.get_device_properties(number).name
    return GpuMemory(name, total, min(total, free + torch.cuda.memory_reserved(number)))


def why_no_gpu() -> str | None:
    """Why torch uses no GPU although this machine has the driver of one, and what to do; None if there is none or it is used."""
    if not has_driver() or sees_gpu():
        return None
    import torch

    visible = os.environ.get(_VISIBLE)
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} was built for CPUs only: install the build for your driver (pip install torch "
            f"--index-url https://download.pytorch.org/whl/cu130, or another of the builds on pytorch.org)"
        )
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        return f"{_VISIBLE}={visible!r} hides all GPUs: unset it, or set it to the number of a GPU"
    return _said_by_driver(torch)


def _said_by_driver(torch: Any) -> str:
    """What torch says when it is to use a GPU that it does not see."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())
    else:
        text = "torch sees no GPU"
    if "driver" in text and "too old" in text:
        return (
            f"the driver is too old for torch {torch.__version__}, which was built for CUDA {torch.version.cuda}: {text} Update "
            f"the driver, or install a build of torch for an older CUDA (pytorch.org)"
        )
    visible = os.environ.get(_VISIBLE)
    return (
        text if visible is None else f"{text} ({_VISIBLE}={visible}: check that it names GPUs that nvidia-smi -L lists)"
    )
