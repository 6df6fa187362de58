"""The entry point that vLLM and vLLM-Omni load in every process.

`register` imports nothing of theirs. It watches for the modules that the ledger names and grafts each right after its
import: a process that never serves diffusion models pays for nothing but the watching.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_HOST = "vllm_omni"


def register() -> None:
    """Arrange for vLLM-Omni to be grafted in this process; calling it again changes nothing.

    Raises:
        GraftError: A graft does not hold on the installed release. Nothing stays grafted; the next call says so again.
    """
    if _HOST in sys.modules or "--omni" in sys.argv:
        _activate()
    elif not any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstImport())


class _FirstImport:
    """A finder that loads the rest of the package when vLLM-Omni is imported for the first time, before it is.

    It does not derive from `importlib.abc.MetaPathFinder`, whose import costs more than all of `register`.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _HOST:
            _activate()
            sys.meta_path.remove(self)
        return None


def _activate() -> None:
    from vllm_omni_diffusion_compile.upstream import activation

    activation.activate()
