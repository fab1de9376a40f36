"""Loads plugin files of ms-swift. In a plugin file, `import swift...` gives the objects of `NAMES` (see `imports`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import turnwise.compat.swift.builtin as builtin
import turnwise.compat.swift.gym as gym
import turnwise.compat.swift.messages as messages
import turnwise.compat.swift.openenv as openenv
import turnwise.compat.swift.outcomes as outcomes
import turnwise.compat.swift.protocol as protocol
import turnwise.compat.swift.rewards as rewards
import turnwise.compat.swift.scheduler as scheduler
from turnwise.compat.swift.engine import InferEngine, Template
from turnwise.compat.swift.imports import Modules, run_file
from turnwise.data.images import load_image
from turnwise.errors import ConfigError, Failed, boundary, nearest

__all__ = ["MODULES", "NAMES", "load", "load_plugins", "modules", "select"]

MODULES = (
    "swift",
    "swift.plugin",
    "swift.plugin.multi_turn",
    "swift.plugin.env",
    "swift.plugin.context_manager",
    "swift.plugin.orm",
    "swift.plugin.prm",
    "swift.rollout",
    "swift.rollout.multi_turn",
    "swift.rollout.gym_env",
    "swift.rollout.openenv_wrapper",
    "swift.rewards",
    "swift.plugin.rm_plugin",
    "swift.rewards.orm",
    "swift.rewards.rm_plugin",
    "swift.llm",
    "swift.llm.infer",
    "swift.llm.infer.protocol",
    "swift.llm.infer.infer_engine",
    "swift.llm.utils",
    "swift.llm.template",
    "swift.llm.template.template",
    "swift.llm.template.template.utils",
    "swift.llm.template.template_inputs",
    "swift.infer_engine",
    "swift.infer_engine.protocol",
    "swift.template",
    "swift.utils",
    "modelscope",
    "modelscope.preprocessors",
    "modelscope.preprocessors.templates",
    "modelscope.preprocessors.templates.utils",
)
"""The modules that a plugin can import. ms-swift has moved objects between modules, so each module has all names. The modules
of modelscope exist only if modelscope is not installed: plugins import types from it."""


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger."""
    return logging.getLogger(name or "turnwise.swift")


def _absent(name: str, instead: str) -> type[Any]:
    """A class that can be imported and subclassed, but raises RuntimeError when it is used."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"turnwise has no {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not available: {instead}"})


def _to_device(inputs: Any, device: Any) -> Any:
    raise RuntimeError("turnwise has no to_device: call a model on a server, or use torch directly")


def _load_image(image: Any) -> Any:
    return load_image(image, where="the scheduler's image")


NAMES: dict[str, Any] = {
    **{
        name: getattr(module, name)
        for module, listed in (
            (protocol, [name for name in protocol.__all__ if not name.endswith("_of")]),
            (scheduler, ["MultiTurnScheduler", "RolloutScheduler", "multi_turns"]),
            (builtin, builtin.__all__),
            (gym, [name for name in gym.__all__ if name != "registered"]),
            (openenv, openenv.__all__),
            (rewards, ["ORM", "AsyncORM", "orms"]),
            (outcomes, outcomes.__all__),
        )
        for name in listed
    },
    "get_logger": get_logger,
    "remove_response": messages.remove_response,
    "RolloutResponseChoice": protocol.ChatCompletionResponseChoice,
    "Template": Template,
    "ThinkingTemplate": Template,
    "to_device": _to_device,
    **{
        name: _absent(name, "reward models are functions in a recipe: reward.trajectory")
        for name in ("DefaultRMPlugin", "GenRMPlugin")
    },
    **{
        name: _absent(name, "a scheduler uses self.infer_engine, and a reward function calls a server of the user")
        for name in ("PtEngine", "TransformersEngine", "VllmEngine")
    },
    "rm_plugins": dict[str, Any](),
    "GRPOVllmEngine": InferEngine,
    "InferEngine": InferEngine,
    "load_image": _load_image,
}
"""The objects that a plugin can import from these modules."""


@functools.cache
def modules() -> Modules:
    """The modules of ms-swift, as plugins import them."""
    return Modules(MODULES, NAMES)


def load(file: str) -> ModuleType:
    """Run a plugin file, once; it registers its classes. Modules in its directory can be imported by it.

    Raises ConfigError if there is no such file, or if it raises an exception.
    """
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"there is no plugin {path}; a plugin is a .py file, relative to the working directory")
    return _loaded(path)


def load_plugins(files: str | Sequence[str]) -> None:
    """Load one or several plugin files. Raises ConfigError."""
    for file in [files] if isinstance(files, str) else files:
        load(file)


@functools.lru_cache(maxsize=256)
def _loaded(path: Path) -> ModuleType:
    name = f"turnwise_swift.{path.stem}_{abs(hash(str(path))):x}"
    try:
        with boundary("import"):
            return run_file(name, path, modules())
    except Failed as failed:
        raise ConfigError(
            f"the plugin {path} could not be loaded: {failed.failure.message}{_lacks(failed)}"
        ) from failed


def select(registry: dict[str, Any], name: str, *, what: str, key: str) -> Any:
    """The object that is registered under `name`, or the object that `file.py:Class` names.

    Raises ConfigError.
    """
    file, colon, inside = name.rpartition(":")
    if colon and file.endswith(".py"):
        module = load(file)
        if not hasattr(module, inside):
            raise ConfigError(f"{key}: {file} has no {inside!r}{nearest(inside, vars(module))}")
        return getattr(module, inside)
    if name not in registry:
        have = ", ".join(sorted(registry))
        raise ConfigError(
            f"{key}: there is no {what} {name!r}{nearest(name, registry)}; registered are: {have}. A plugin registers one: "
            f"external_plugins: [plugin.py]"
        )
    return registry[name]


def _lacks(failed: Failed) -> str:
    cause = failed.__cause__
    if not isinstance(cause, ImportError) or not (cause.name or "").startswith("swift"):
        return ""
    listed = ", ".join(sorted(NAMES)) if cause.name in MODULES else ", ".join(MODULES)
    return f". The parts of ms-swift that can be imported: {listed}"
