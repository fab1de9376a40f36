"""Provides verl's module names while a user's code is loaded or called.

Inside `with verl_names():`, turnwise provides the modules of `NAMES`, whether or not verl is installed. A recipe therefore does
not depend on the other packages that are installed. The installed verl, if any, provides everything else: its other modules,
the names that its packages define (`verl.DataProto`), and the names that turnwise's version of a module does not have. These
modules are executed once and kept for the next use, so that their caches and classes stay the same. A module of verl that
turnwise does not provide and that was imported outside is the same object inside.
Outside, `sys.modules` is unchanged: importing turnwise patches nothing.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from turnwise.errors import nearest

_HERE = "turnwise.compat.verl"

_BOXED = (f"{_HERE}.helpers:last_boxed_only_string", f"{_HERE}.helpers:remove_boxed")

_AGENT_LOOPS = (
    f"{_HERE}.agent_loops:AgentLoopBase",
    f"{_HERE}.agent_loops:AgentLoopMetrics",
    f"{_HERE}.agent_loops:AgentLoopOutput",
)

_TOOL_REGISTRY = (
    f"{_HERE}.files:ToolType",
    f"{_HERE}.files:get_tool_class",
    f"{_HERE}.files:initialize_tools_from_config",
)

NAMES: dict[str, tuple[str, ...]] = {
    "verl.interactions.base": (f"{_HERE}.base:BaseInteraction",),
    "verl.interactions.gsm8k_interaction": (f"{_HERE}.shipped:Gsm8kInteraction",),
    "verl.interactions.weather_interaction": (f"{_HERE}.shipped:WeatherInteraction",),
    "verl.interactions.utils.interaction_registry": (
        f"{_HERE}.files:get_interaction_class",
        f"{_HERE}.files:initialize_interactions_from_config",
    ),
    "verl.tools.base_tool": (
        f"{_HERE}.base:BaseTool",
        f"{_HERE}.files:initialize_tools_from_config",  # in this module up to v0.4
        f"{_HERE}.base:OpenAIFunctionToolSchema",
        f"{_HERE}.base:ToolResponse",
    ),
    "verl.tools.schemas": (
        f"{_HERE}.base:OpenAIFunctionCallSchema",
        f"{_HERE}.base:OpenAIFunctionParametersSchema",
        f"{_HERE}.base:OpenAIFunctionParsedSchema",
        f"{_HERE}.base:OpenAIFunctionPropertySchema",
        f"{_HERE}.base:OpenAIFunctionSchema",
        f"{_HERE}.base:OpenAIFunctionToolCall",
        f"{_HERE}.base:OpenAIFunctionToolSchema",
        f"{_HERE}.base:ToolResponse",
    ),
    "verl.tools.gsm8k_tool": (f"{_HERE}.shipped:Gsm8kTool",),
    "verl.tools.geo3k_tool": (f"{_HERE}.shipped:Geo3kTool",),
    "verl.tools.image_zoom_in_tool": (f"{_HERE}.shipped:ImageZoomInTool",),
    "verl.tools.search_tool": (f"{_HERE}.tools:SearchTool", f"{_HERE}.tools:PoolMode"),
    "verl.tools.sandbox_fusion_tools": (
        f"{_HERE}.tools:SandboxFusionTool",
        f"{_HERE}.tools:PoolMode",
        f"{_HERE}.tools:init_execution_pool",
    ),
    "verl.tools.utils.search_r1_like_utils": (f"{_HERE}.helpers:perform_single_search_batch",),
    "verl.experimental.agent_loop": (*_AGENT_LOOPS, f"{_HERE}.agent_loops:register"),
    "verl.experimental.agent_loop.agent_loop": (
        *_AGENT_LOOPS,
        f"{_HERE}.agent_loops:DictConfigWrap",
        f"{_HERE}.agent_loops:LLMServerClient",
        f"{_HERE}.agent_loops:AsyncLLMServerManager",
        f"{_HERE}.agent_loops:ToolListWrap",
        f"{_HERE}.agent_loops:_agent_loop_registry",
        f"{_HERE}.agent_loops:register",
    ),
    "verl.experimental.agent_loop.tool_agent_loop": (f"{_HERE}.base:AgentData",),
    "verl.experimental.agent_loop.tool_parser": (
        f"{_HERE}.base:FunctionCall",
        f"{_HERE}.tool_parser:ToolParser",
        f"{_HERE}.tool_parser:HermesToolParser",
        f"{_HERE}.tool_parser:GptOssToolParser",
        f"{_HERE}.tool_parser:Qwen3XMLToolParser",
    ),
    "verl.workers.rollout.replica": (f"{_HERE}.agent_loops:TokenOutput",),
    "verl.workers.rollout.llm_server": (f"{_HERE}.agent_loops:LLMServerClient",),
    "verl.utils.profiler": (f"{_HERE}.agent_loops:simple_timer",),
    "verl.utils.ray_utils": (f"{_HERE}.agent_loops:get_event_loop",),
    "verl.tools.function_tool": (
        f"{_HERE}.tools:FUNCTION_TOOL_REGISTRY",
        f"{_HERE}.tools:FunctionTool",
        f"{_HERE}.tools:function_tool",
        f"{_HERE}.tools:get_function_tool",
        f"{_HERE}.tools:load_function_tools_from_path",
        f"{_HERE}.tools:normalize_function_tool_return",
    ),
    "verl.tools.tool_registry": (*_TOOL_REGISTRY, f"{_HERE}.files:load_all_tools"),
    "verl.tools.mcp_base_tool": (f"{_HERE}.tools:MCPBaseTool",),
    "verl.tools.mcp_search_tool": (f"{_HERE}.tools:MCPSearchTool",),
    "verl.tools.utils.tool_registry": _TOOL_REGISTRY,
    "verl.utils.hdfs_io": (f"{_HERE}.helpers:copy", f"{_HERE}.helpers:exists", f"{_HERE}.helpers:makedirs"),
    "verl.utils.fs": (
        f"{_HERE}.helpers:copy",
        f"{_HERE}.helpers:copy_to_local",
        f"{_HERE}.helpers:exists",
        f"{_HERE}.helpers:makedirs",
    ),
    "verl.utils.reward_score": (f"{_HERE}.helpers:default_compute_score",),
    "verl.utils.reward_score.gsm8k": (
        f"{_HERE}.helpers:compute_score",
        f"{_HERE}.helpers:extract_solution",
    ),
    "verl.utils.reward_score.math": _BOXED,  # the name of this module up to v0.5
    "verl.utils.reward_score.math_reward": _BOXED,
    "verl.utils.rollout_trace": (f"{_HERE}.names:rollout_trace_op", f"{_HERE}.names:rollout_trace_attr"),
    "verl.utils.dataset.vision_utils": (f"{_HERE}.helpers:process_image", f"{_HERE}.helpers:process_video"),
}
"""The modules of verl that turnwise provides, and the objects in each module, as `module:name`."""

_FOLDERS = {name.rsplit(".", depth)[0] for name in NAMES for depth in range(1, name.count(".") + 1)}


def rollout_trace_op(function: Any) -> Any:
    """verl's decorator for traces. Returns the function unchanged, because conversations are always recorded (docs/record.md)."""
    return function


@contextmanager
def rollout_trace_attr(*args: Any, **kwargs: Any) -> Iterator[None]:
    """verl's context manager for traces; has no effect here."""
    yield


def _places(module: str) -> dict[str, tuple[str, str]]:
    """The names that turnwise provides in a module of verl: name to (turnwise module, name in that module)."""
    split = [place.partition(":") for place in NAMES.get(module, ())]
    return {name: (home, name) for home, _, name in split}


def ours(module: str, name: str) -> Any | None:
    """turnwise's object for a name in a module of verl; None if turnwise does not provide the name."""
    place = _places(module).get(name)
    return None if place is None else getattr(importlib.import_module(place[0]), place[1])


class _LentModule(ModuleType):
    """A module of verl: turnwise provides the names in `NAMES`; the installed verl provides all other names.

    Reads and writes of turnwise's names go to the turnwise module that defines them. Classes that use a name therefore see a
    replacement of it (`unittest.mock.patch`). The installed module is executed only when it is first needed: importing verl
    takes seconds, and fails if one of its dependencies is missing.
    """

    def __getattr__(self, name: str) -> Any:
        own = _places(self.__name__)
        if name in own:
            home, attribute = own[name]
            return getattr(importlib.import_module(home), attribute)
        if name.startswith("__") and name != "__version__":  # the import system and `inspect` read these names
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if "__path__" in vars(self) and _FINDER.find_spec(f"{self.__name__}.{name}", self.__path__, quiet=True):
            return importlib.import_module(f"{self.__name__}.{name}")
        real = _FINDER.installed_module(self)
        if real is not None and name in vars(real):
            return vars(real)[name]
        raise AttributeError(f"{self.__name__} has no {name!r} here{nearest(name, own)}; it has: {', '.join(own)}")

    def __setattr__(self, name: str, value: Any) -> None:
        place = _places(self.__name__).get(name)
        if place is None:
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(place[0]), place[1], value)

    def __delattr__(self, name: str) -> None:
        place = _places(self.__name__).get(name)
        if place is None:
            super().__delattr__(name)
        else:
            delattr(importlib.import_module(place[0]), place[1])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_places(self.__name__)]


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `NAMES` and their parent packages; finds other modules only in an installed verl."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}
        self._modules: dict[str, ModuleType | None] = {}
        self._lock = threading.RLock()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
        *,
        quiet: bool = False,
    ) -> ModuleSpec | None:
        """The spec of a module of verl; None for other packages.

        If there is no such module: None with `quiet`; otherwise ModuleNotFoundError, which lists the available modules.
        """
        if fullname.partition(".")[0] != "verl":
            return None
        lent, package = fullname in NAMES or fullname in _FOLDERS, fullname in _FOLDERS
        real = self.installed(fullname, path)
        if lent:
            self._specs[fullname] = real
            spec = ModuleSpec(fullname, self, origin="turnwise", is_package=package)
            if package:
                spec.submodule_search_locations = list((real and real.submodule_search_locations) or ())
            return spec
        if real is None and not quiet:
            raise ModuleNotFoundError(
                f"verl is not installed here, and turnwise has no module of its own for {fullname}"
                f"{nearest(fullname, NAMES)}; it has: {', '.join(sorted(NAMES))}",
                name=fullname,
            )
        return real

    def installed(self, fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The spec that the other finders of `sys.meta_path` find; None if they find no spec."""
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path)) is not None:
                return spec
        return None

    def installed_module(self, lent: ModuleType) -> ModuleType | None:
        """The executed installed module with the name of `lent`; None if it does not exist or is still being executed."""
        name = lent.__name__
        with self._lock:
            if name not in self._modules:
                self._modules[name] = None
                spec = self._specs.get(name)
                if spec is not None and spec.loader is not None:
                    module = module_from_spec(spec)
                    try:
                        spec.loader.exec_module(module)
                    except BaseException:
                        del self._modules[name]  # so that the next access raises the same error again
                        raise
                    self._modules[name] = module
            return self._modules[name]

    def forget(self) -> None:
        """Forget the installed modules, because the installation of verl has changed."""
        self._specs.clear()
        self._modules.clear()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _LentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in NAMES:
            vars(module)["__all__"] = list(_places(module.__name__))


_FINDER = _Finder()


class _Names:
    """Counts the active `verl_names()` contexts. The names exist while at least one context is active."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = 0
        self._outside_modules: dict[str, ModuleType] = {}
        self._kept: dict[str, ModuleType] = {}
        """The modules that were imported inside, kept for the next use."""
        self._kept_of: tuple[str, ...] | None = None
        """The folders of the installed verl that the kept modules belong to; None if verl is not installed."""

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._outside_modules = _taken()
                spec = _FINDER.installed("verl", None)
                place = None if spec is None else tuple(spec.submodule_search_locations or ())
                if place != self._kept_of:
                    self._kept, self._kept_of = {}, place
                    _FINDER.forget()
                lent = {*NAMES, *_FOLDERS}
                sys.modules.update({name: module for name, module in self._outside_modules.items() if name not in lent})
                sys.modules.update(self._kept)
                sys.meta_path.insert(0, _FINDER)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.meta_path.remove(_FINDER)
                before = self._outside_modules
                self._kept = {name: module for name, module in _taken().items() if before.get(name) is not module}
                sys.modules.update(before)
                self._outside_modules = {}


def _taken() -> dict[str, ModuleType]:
    """Remove verl's modules from `sys.modules` and return them by name."""
    names = [name for name in list(sys.modules) if name == "verl" or name.startswith("verl.")]
    return {name: sys.modules.pop(name) for name in names}


_NAMES = _Names()


@contextmanager
def verl_names() -> Iterator[None]:
    """Inside this context, turnwise provides verl's names. Several conversations and threads may enter it at the same time."""
    _NAMES.enter()
    try:
        yield
    finally:
        _NAMES.leave()
