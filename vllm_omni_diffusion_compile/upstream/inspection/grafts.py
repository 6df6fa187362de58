"""What becomes of every graft on the installed release, with the other plugins that it loads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.errors import GraftError
from vllm_omni_diffusion_compile.upstream.graft import Graft, covered, examine

_COMPOSED = (
    "nothing, if what you serve is right; else compare with {other} left out of VLLM_PLUGINS, and report it to both"
)
_DAMAGED = "install what it lacks, or the release of vLLM-Omni again, before you serve what comes past there"


def load_host() -> None:
    """Load vLLM-Omni and its plugins as `vllm serve --omni` does: first its command, then the plugins.

    Raises:
        GraftError: A graft does not hold.
        Exception: Whatever an installation that cannot be imported raises.
    """
    importlib.import_module("vllm_omni.entrypoints.cli.serve")
    importlib.import_module("vllm.plugins").load_general_plugins()


def check_grafts() -> Iterator[Finding]:
    """Check every row of the ledger, in its order; the host is loaded already, see `load_host`."""
    # Their adapters need vLLM at import.
    from vllm_omni_diffusion_compile.upstream import activation
    from vllm_omni_diffusion_compile.upstream.ledger import GRAFTS

    modules: dict[str, ModuleType | BaseException] = {}
    for graft in GRAFTS:
        if graft.module not in modules:
            modules[graft.module] = _imported(graft.module)
    if any(isinstance(module, GraftError) for module in modules.values()):
        # One that does not hold ends the start. Without any of them, each can be looked at by itself.
        activation.deactivate()
        modules = {name: _imported(name) for name in modules}
    composed = {outcome.graft: outcome.composed_with for outcome in activation.outcomes}
    states = {outcome.graft: outcome.state for outcome in activation.outcomes}

    def judged(graft: Graft) -> Finding:
        module = modules[graft.module]
        if isinstance(module, BaseException):
            return Finding.limit(graft.target, f"cannot be imported: {_shown(module)}", _DAMAGED)
        if activation.active():
            return _applied(graft, module, states.get(graft), composed.get(graft))
        try:
            outcome = examine(graft, module)
        except GraftError as error:
            return Finding.broken(
                graft.target, f"refused: expected {error.expected}, found {error.found}", error.remedy
            )
        found = f"would be {outcome.state}, were no other graft refused"
        return Finding.ok(graft.target, found, group=found)

    yield from map(judged, GRAFTS)


def _applied(graft: Graft, module: ModuleType, state: str | None, composed_with: str | None) -> Finding:
    after = covered(graft, module)
    if after is not None:
        seen = "which calls ours" if after.calls_ours else "and ours is not seen behind it"
        return Finding.limit(
            graft.target,
            f"applied, then wrapped by {after.by}, {seen}",
            _COMPOSED.format(other=after.by)
            if after.calls_ours
            else f"leave {after.by} out of VLLM_PLUGINS, or have it wrap with functools.wraps and call what it found",
        )
    if composed_with is not None:
        return Finding.limit(
            graft.target, f"composed with {composed_with}: ours calls theirs", _COMPOSED.format(other=composed_with)
        )
    found = "applied" if state in (None, "already applied") else str(state)
    return Finding.ok(graft.target, found, group=found)


def _imported(name: str) -> ModuleType | BaseException:
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is reported
        return _cause(error)


def _cause(error: BaseException) -> BaseException:
    """Return the GraftError behind an error of an import, if there is one."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, GraftError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
