"""Modules by verl's names, for as long as a user's code is loaded or called.

`with verl_names():` makes `import verl.interactions.base` and the others of `NAMES` give ours, and takes every trace of it
back: nothing is patched when turnwise is imported, and afterwards `sys.modules` is as it was. The names in `NAMES` are ours
wherever this runs, so that a recipe does not depend on what else is installed; any other module of verl comes from verl,
where it is installed.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from turnwise.errors import nearest

__all__ = ["NAMES", "ours", "verl_names"]

_HERE = "turnwise.compat.verl"

NAMES: dict[str, tuple[str, ...]] = {
    "verl.interactions.base": (f"{_HERE}.base:BaseInteraction",),
    "verl.interactions.gsm8k_interaction": (f"{_HERE}.shipped:Gsm8kInteraction",),
    "verl.interactions.weather_interaction": (f"{_HERE}.shipped:WeatherInteraction",),
    "verl.tools.base_tool": (
        f"{_HERE}.base:BaseTool",
        f"{_HERE}.schemas:OpenAIFunctionToolSchema",
        f"{_HERE}.schemas:ToolResponse",
    ),
    "verl.tools.schemas": (
        f"{_HERE}.schemas:OpenAIFunctionCallSchema",
        f"{_HERE}.schemas:OpenAIFunctionParametersSchema",
        f"{_HERE}.schemas:OpenAIFunctionParsedSchema",
        f"{_HERE}.schemas:OpenAIFunctionPropertySchema",
        f"{_HERE}.schemas:OpenAIFunctionSchema",
        f"{_HERE}.schemas:OpenAIFunctionToolCall",
        f"{_HERE}.schemas:OpenAIFunctionToolSchema",
        f"{_HERE}.schemas:ToolResponse",
    ),
    "verl.tools.gsm8k_tool": (f"{_HERE}.shipped:Gsm8kTool",),
    "verl.tools.search_tool": (f"{_HERE}.services:SearchTool",),
    "verl.tools.sandbox_fusion_tools": (f"{_HERE}.services:SandboxFusionTool",),
    "verl.tools.mcp_base_tool": (f"{_HERE}.services:MCPBaseTool",),
    "verl.tools.mcp_search_tool": (f"{_HERE}.services:MCPSearchTool",),
    "verl.utils.reward_score.gsm8k": (
        f"{_HERE}.reward_score:compute_score",
        f"{_HERE}.reward_score:extract_solution",
    ),
    "verl.utils.rollout_trace": (f"{_HERE}.names:rollout_trace_op", f"{_HERE}.names:rollout_trace_attr"),
    "verl.utils.dataset.vision_utils": (f"{_HERE}.vision:process_image", f"{_HERE}.vision:process_video"),
}
"""The modules that are ours, and what is in them."""

_FOLDERS = {name.rsplit(".", depth)[0] for name in NAMES for depth in range(1, name.count(".") + 1)}


def rollout_trace_op(function: Any) -> Any:
    """verl's decorator for traces. Conversations are recorded anyway (docs/record.md), so it leaves a function as it is."""
    return function


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """verl's context for traces, likewise."""
    yield


def ours(module: str, name: str) -> Any | None:
    """What we have under a name of verl's, or None."""
    for place in NAMES.get(module, ()):
        home, _, attribute = place.partition(":")
        if attribute == name:
            return getattr(importlib.import_module(home), name)
    return None


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `NAMES`, and the folders above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "verl":
            return None
        if fullname in NAMES:
            return ModuleSpec(fullname, self, origin="turnwise")
        real = self._installed(fullname, path)
        if fullname in _FOLDERS:
            spec = ModuleSpec(fullname, self, origin="turnwise", is_package=True)
            spec.submodule_search_locations = list(real.submodule_search_locations or ()) if real is not None else []
            return spec
        if real is None:
            raise ModuleNotFoundError(
                f"verl is not installed here, and turnwise has no module of its own for {fullname}"
                f"{nearest(fullname, NAMES)}; it has: {', '.join(sorted(NAMES))}",
                name=fullname,
            )
        return real

    def _installed(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """What others would find."""
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path)) is not None:
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for place in NAMES.get(module.__name__, ()):
            home, _, attribute = place.partition(":")
            setattr(module, attribute, getattr(importlib.import_module(home), attribute))


class _Names:
    """Who uses the names now: they are there from the first one in until the last one is out."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0
        self._finder = _Finder()
        self._before: dict[str, ModuleType] = {}

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = _taken()
                sys.meta_path.insert(0, self._finder)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.meta_path.remove(self._finder)
                _taken()
                sys.modules.update(self._before)
                self._before = {}


def _taken() -> dict[str, ModuleType]:
    """Take verl's modules out of `sys.modules`."""
    if "verl" not in sys.modules:  # a module is never there without those above it
        return {}
    names = [name for name in sys.modules if name == "verl" or name.startswith("verl.")]
    return {name: sys.modules.pop(name) for name in names}


_NAMES = _Names()


@contextmanager
def verl_names() -> Iterator[None]:
    """Inside, verl's names are ours. May be entered from several conversations and threads at once."""
    _NAMES.enter()
    try:
        yield
    finally:
        _NAMES.leave()
