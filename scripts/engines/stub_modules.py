"""What SGLang's environment needs beside packages to run on the CPU.

Empty modules for what SGLang imports on the CPU and never uses: torchvision, vllm's custom operations and some others. And pinned
memory: SGLang's LoRA layers ask for it, and a build of torch without an accelerator has none. There it means ordinary memory.

Loaded by stub_modules.pth when the interpreter of SGLang's environment starts. Any attribute of a stub is an empty class, whose
attributes are empty classes too. Creating an object of such a class raises an error.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = ("torchvision", "timm", "decord", "modelscope")
"""Stubs with all their submodules."""
MODULES = ("vllm", "vllm._custom_ops")
"""Stubs without further submodules: SGLang imports other parts of vllm only if they are there."""


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _unavailable(f"{cls.__name__}.{name}")


class _Unavailable(metaclass=_AnyAttribute):
    def __init__(self, *_args, **_kwargs):
        raise RuntimeError(
            "this environment has no such package: only a stub, made by turnwise's scripts/engine_env.py"
        )


def _unavailable(name):
    return _AnyAttribute(name, (_Unavailable,), {})


class _Stub(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _unavailable(f"{self.__name__}.{name}")


def _is_probe():
    """Whether somebody asks if the package is there (importlib.util.find_spec), as transformers does. It is not there."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


class _StubFinder(MetaPathFinder, Loader):
    def find_spec(self, fullname, _path=None, _target=None):
        wanted = fullname in MODULES or fullname.partition(".")[0] in PACKAGES
        if wanted and not _is_probe():
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


class _PinnedMemory(MetaPathFinder):
    """Changes torch before SGLang's LoRA layers are imported; finds no module itself."""

    def find_spec(self, fullname, _path=None, _target=None):
        if fullname == "sglang.srt.lora":
            sys.meta_path.remove(self)
            _make_pinned_memory_ordinary()


def _make_pinned_memory_ordinary():
    import torch

    if torch.accelerator.is_available():
        return
    torch.Tensor.pin_memory = lambda self, device=None: self
    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(function):
    def call(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return call


# last: a real package is preferred
sys.meta_path.append(_StubFinder())
sys.meta_path.insert(0, _PinnedMemory())
