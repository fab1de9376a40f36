"""`import swift...` in a plugin file, at any time: at its top, and inside a method that runs later, in any thread.

A module looks up `import` in its own builtins. A plugin file, and the modules that it imports from its own folder, run with
builtins whose `import` returns turnwise's modules under ms-swift's names. Other code is not affected: the modules under
ms-swift's names are not put into `sys.modules`. The behaviour is the same whether or not ms-swift is installed.
"""

from __future__ import annotations

import builtins
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Modules", "run_file"]

_ROOT = "swift"
"""turnwise always provides modules of this name. It provides modules of other names only if no such package is installed."""


class Modules:
    """Modules of ms-swift by name. ms-swift has moved names between its modules, so each module here has all names."""

    def __init__(self, listed: Sequence[str], names: Mapping[str, Any]) -> None:
        self._modules: dict[str, ModuleType] = {}
        tops = {name.partition(".")[0] for name in listed}
        installed = {top for top in tops if top != _ROOT and importlib.util.find_spec(top) is not None}
        self._tops = tops - installed
        for name in (name for name in listed if name.partition(".")[0] in self._tops):
            module = self._modules[name] = ModuleType(name, "turnwise's own, for plugins written for ms-swift")
            module.__path__ = []  # marks a package; its only submodules are those of this table
            vars(module).update(names)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._modules[parent], child, module)

    def __contains__(self, top: str) -> bool:
        """Whether turnwise provides the top-level module `top`."""
        return top in self._tops

    def get(self, name: str, *, top: bool) -> ModuleType:
        """The module, or with `top` its top-level package. Raises ModuleNotFoundError if there is no module of that name."""
        if name not in self._modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return self._modules[name.partition(".")[0] if top else name]


def run_file(name: str, path: Path, modules: Modules) -> ModuleType:
    """Run a file as the module `name`. Modules that it imports from its own folder run in the same way.

    Raises the exceptions of the file; the module is then not in `sys.modules`.
    """
    folder = _Folder(path.parent, modules)
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path), folder))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module in `sys.modules`
    try:
        with folder.importable():  # for importlib.import_module, which does not use the builtins
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Folder:
    """Finds the modules of a plugin's folder, and runs them in the same way as the plugin."""

    def __init__(self, folder: Path, modules: Modules) -> None:
        self._folder = str(folder)
        self._modules = modules
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        """The builtins of the modules in the folder."""

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """The function that an `import` statement calls."""
        top = name.partition(".")[0]
        if not level and top in self._modules:
            return self._modules.get(name, top=not fromlist)
        if level or top in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        with self.importable():
            return builtins.__import__(name, globals, locals, fromlist or (), level)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The method of a finder in `sys.meta_path`."""
        if path is not None and not any(str(entry).startswith(self._folder) for entry in path):
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(name, [self._folder] if path is None else path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(name, spec.loader.path, self)
        return spec

    @contextmanager
    def importable(self) -> Iterator[None]:
        """In this context, the folder's modules can be imported; they take precedence over installed modules of the same name."""
        finders: list[Any] = sys.meta_path
        place = next((n for n, finder in enumerate(finders) if finder is PathFinder), len(finders))
        finders.insert(place, self)
        try:
            yield
        finally:
            finders.remove(self)


class _Loader(SourceFileLoader):
    """Runs a file with the builtins of its folder."""

    def __init__(self, name: str, path: str, folder: _Folder) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._folder.builtins
        super().exec_module(module)
