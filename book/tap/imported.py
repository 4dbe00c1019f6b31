"""L2: modules seen as they are imported, so that nothing has to import them before the program does."""
from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from typing import Any

from book.tap.replaced import when_stopped


def once_imported(name: str, seen: Callable[[types.ModuleType], None]) -> None:
    """Have `seen` called with a module now, or once the program has imported it, until `undo`."""
    if name in sys.modules:
        seen(sys.modules[name])
        return
    finder = AfterImport(name, seen)
    sys.meta_path.insert(0, finder)

    def forget() -> None:
        with suppress(ValueError):  # it has been imported
            sys.meta_path.remove(finder)

    when_stopped(forget)


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has `seen` called with a module once it has been loaded, whoever imports it."""

    def __init__(self, name: str, seen: Callable[[types.ModuleType], None]) -> None:
        self._name, self._seen = name, seen

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the module as the others would, and be its loader."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader: Any = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """As its own loader does."""
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Load it, and tell."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._seen(module)
