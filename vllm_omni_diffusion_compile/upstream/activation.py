"""Applying the ledger in one process, and saying what became of it."""

from __future__ import annotations

import sys
from types import ModuleType

from packaging.specifiers import SpecifierSet

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.upstream.after_import import AfterImport
from vllm_omni_diffusion_compile.upstream.graft import Outcome, graft_module, installed_release, undo
from vllm_omni_diffusion_compile.upstream.ledger import GRAFTS
from vllm_omni_diffusion_compile.upstream.log import host_logger
from vllm_omni_diffusion_compile.upstream.releases import TESTED_RELEASES

logger = host_logger(__name__)
outcomes: list[Outcome] = []
_watch: AfterImport | None = None


def activate() -> None:
    """Graft what is imported, watch for what is not, and say so in one line; once a process.

    Raises:
        GraftError: A graft does not hold on the installed release; everything is put back.
    """
    global _watch
    if _watch is not None:
        return
    _watch = AfterImport({graft.module for graft in GRAFTS}, _graft)
    try:
        _watch.install()
    except BaseException:
        deactivate()
        raise
    _say_once()


def active() -> bool:
    """Whether this process is being grafted."""
    return _watch is not None


def deactivate() -> None:
    """Undo every graft and stop watching; for tests and interactive sessions."""
    global _watch
    if _watch is not None:
        _watch.remove()
        _watch = None
    undo(GRAFTS)
    outcomes.clear()


def _graft(module: ModuleType) -> None:
    new = graft_module(module, [graft for graft in GRAFTS if graft.module == module.__name__])
    outcomes.extend(new)
    for outcome in new:
        if outcome.composed_with is not None:
            logger.info(
                "%s was already wrapped by %s; our wrapper calls theirs.", outcome.graft.target, outcome.composed_with
            )
        elif outcome.state == "native":
            logger.info("%s: this release has it natively; ours steps aside.", outcome.graft.target)


def _say_once() -> None:
    release = installed_release("vllm-omni")
    if release is not None and not SpecifierSet(TESTED_RELEASES, prereleases=True).contains(release):
        logger.warning(
            "vLLM-Omni %s is outside of the range that vllm-omni-diffusion-compile %s was tested with (%s). Every "
            "graft is still checked against what it was written for before it is applied.",
            release, __version__, TESTED_RELEASES,
        )  # fmt: skip
    states = [outcome.state for outcome in outcomes]
    pending = {graft.module for graft in GRAFTS} - set(sys.modules)
    logger.info(
        "vllm-omni-diffusion-compile %s on vLLM-Omni %s: %d graft(s) applied, %d native, those of %d more module(s) "
        "follow when they are imported.",
        __version__, release or "(unknown)", states.count("applied"), states.count("native"), len(pending),
    )  # fmt: skip
