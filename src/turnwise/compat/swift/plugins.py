"""Plugin files of ms-swift: loaded under its names, which are ours while they load.

`import swift...` means what is listed in `NAMES` inside `names()`, and nothing is left of it afterwards. It is so whether
ms-swift is installed or not, so that a plugin does the same everywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import turnwise.compat.swift.builtin as builtin
import turnwise.compat.swift.gym as gym
import turnwise.compat.swift.protocol as protocol
import turnwise.compat.swift.rewards as rewards
import turnwise.compat.swift.scheduler as scheduler
from turnwise.compat.swift.engine import Template
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.images import load_image

__all__ = ["MODULES", "NAMES", "load", "names", "select"]

MODULES = (
    "swift",
    "swift.plugin",
    "swift.plugin.multi_turn",
    "swift.plugin.env",
    "swift.plugin.context_manager",
    "swift.plugin.orm",
    "swift.rollout",
    "swift.rollout.multi_turn",
    "swift.rollout.gym_env",
    "swift.rewards",
    "swift.plugin.rm_plugin",
    "swift.rewards.orm",
    "swift.rewards.rm_plugin",
    "swift.llm",
    "swift.llm.infer",
    "swift.llm.infer.protocol",
    "swift.llm.template",
    "swift.llm.template.template_inputs",
    "swift.infer_engine",
    "swift.infer_engine.protocol",
    "swift.template",
    "swift.utils",
)
"""The modules that can be imported; ms-swift has moved things between them, so each has all names."""


def get_logger(name: str | None = None) -> logging.Logger:
    """A logger."""
    return logging.getLogger(name or "turnwise.swift")


def _absent(name: str, instead: str) -> type[Any]:
    """A class that can be imported and subclassed, and says when it is used that it is not here."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"there is no {name} here: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not here: {instead}"})


def _to_device(inputs: Any, device: Any) -> Any:
    raise RuntimeError("there is no to_device here: a plugin runs no model of its own; ask a server, or use torch")


def _load_image(image: Any) -> Any:
    return load_image(image, where="the scheduler's image")


NAMES: dict[str, Any] = {
    **{
        name: getattr(module, name)
        for module, listed in (
            (protocol, [name for name in protocol.__all__ if not name.endswith("_of")]),
            (scheduler, ["MultiTurnScheduler", "RolloutScheduler", "multi_turns"]),
            (builtin, builtin.__all__),
            (gym, gym.__all__),
            (rewards, ["ORM", "AsyncORM", "Format", "MathAccuracy", "orms"]),
        )
        for name in listed
    },
    "get_logger": get_logger,
    "Template": Template,
    "to_device": _to_device,
    **{
        name: _absent(name, "reward models are functions in a recipe: reward.trajectory")
        for name in ("DefaultRMPlugin", "GenRMPlugin")
    },
    **{
        name: _absent(name, "a scheduler asks self.infer_engine, and a reward function asks a server of its own")
        for name in ("PtEngine", "TransformersEngine", "VllmEngine")
    },
    "rm_plugins": dict[str, Any](),
    "OpenEnvScheduler": _absent("OpenEnvScheduler", "write an Env that asks the server, and take the gym_scheduler"),
    "load_image": _load_image,
}
"""What can be imported from them."""


@contextmanager
def names() -> Iterator[None]:
    """While it is open, `import swift...` gives ours."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "swift"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(_modules())
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
            del sys.modules[name]
        sys.modules.update(before)


@functools.cache
def _modules() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for name in MODULES:
        module = found[name] = ModuleType(name, "turnwise's own, for plugins written for ms-swift")
        module.__path__ = []  # a package, which has the modules below it and no others
        vars(module).update(NAMES)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(found[parent], child, module)
    return found


def load(file: str) -> ModuleType:
    """Run a plugin file, once; it registers what it has. Its own directory is importable meanwhile.

    Raises ConfigError if there is no such file, or it cannot be run.
    """
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"there is no plugin {path}; a plugin is a .py file, relative to the directory you run from")
    return _loaded(path)


@functools.lru_cache(maxsize=256)
def _loaded(path: Path) -> ModuleType:
    name = f"turnwise_swift.{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    try:
        with names(), boundary("import"):
            spec.loader.exec_module(module)
    except Failed as failed:
        del sys.modules[name]
        raise ConfigError(
            f"the plugin {path} could not be loaded: {failed.failure.message}{_lacks(failed)}"
        ) from failed
    finally:
        sys.path.remove(str(path.parent))
    return module


def select(registry: dict[str, Any], name: str, *, what: str, key: str) -> Any:
    """What is registered by a name, or named as `file.py:Class`.

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
    return f". Of ms-swift there is here: {listed}"
