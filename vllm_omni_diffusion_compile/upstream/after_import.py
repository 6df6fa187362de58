"""Run something right after a module was imported, and not import it for that."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType


class AfterImport:
    """Calls back with each watched module once its body has run, before anybody else sees the module.

    An error of the callback fails that import, as an error in the module itself would.

    Args:
        names: Modules to watch.
        callback: Told the module.
    """

    def __init__(self, names: Iterable[str], callback: Callable[[ModuleType], None]) -> None:
        self._waiting = set(names)
        self._callback = callback
        self._searching = threading.local()

    def install(self) -> None:
        """Call back for what is imported already, then watch for the rest."""
        for name in sorted(self._waiting & set(sys.modules)):
            self._waiting.discard(name)
            self._callback(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting or getattr(self._searching, "name", None) == fullname:
            return None
        self._searching.name = fullname  # the search comes past here again, in this thread
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.name = None
        if spec is None or spec.loader is None:
            return None
        run_body = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_body(module)
            self._callback(module)
            self._waiting.discard(fullname)

        # On this one loader object: its class, and with it everything else that a loader can be asked, stays as it is.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
