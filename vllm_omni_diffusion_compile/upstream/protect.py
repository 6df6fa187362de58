"""How the regions of a component are compiled, and what catches them when that fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings, effective_recompile_limit
from vllm_omni_diffusion_compile.upstream import fallbacks
from vllm_omni_diffusion_compile.upstream.shutdown import told_to_stop


def recompile_limit(limit: int, *, takes_options: bool = True) -> dict[str, Any]:
    """Return the option of `torch.compile` that allows so many compilations of one piece of code.

    Before torch 2.12 there is no such option, but limits for the process, which are raised.

    Args:
        limit: How many.
        takes_options: Whether what is called takes the options that this torch knows.
    """
    import torch

    if takes_options and "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": limit}
    config = torch._dynamo.config
    config.recompile_limit = max(limit, config.recompile_limit)
    config.accumulated_recompile_limit = max(limit, config.accumulated_recompile_limit)
    return {}


class Protect:
    """How the regions of one component are compiled and what catches them; see `compile.scope.Protect`."""

    def __init__(
        self, path: str, component: Any, settings: DiffusionCompileSettings, ranks: Any | None, logger: Any
    ) -> None:
        from vllm_omni_diffusion_compile.compile.backend import resolve_backend
        from vllm_omni_diffusion_compile.compile.scope import has_own_compile

        # Before anything is set up: a backend that is not there is no failure of the compiler.
        self._backend = resolve_backend(settings.diffusion_compile_config.backend)
        self._path = path
        self._settings = settings
        self._ranks = ranks
        self._fails_closed = settings.diffusion_compile_config.on_failure == "raise"
        self._logger = logger
        self._latches: dict[str, Any] = {}
        self._backends: dict[str, Any] = {}
        self._own_compile = settings.diffusion_compile_granularity == "full" and has_own_compile(component)

    def compile_options(self, region: str) -> Mapping[str, Any]:
        config = self._settings.diffusion_compile_config
        options: dict[str, Any] = {"dynamic": self._settings.diffusion_compile_dynamic}
        if not config.needs_inductor:
            options["backend"] = self._backend
        if config.mode != "default":
            options["mode"] = config.mode
        if self._ranks is not None:
            options = {"dynamic": options["dynamic"], "backend": self._guarded(region, options)}
        limit = effective_recompile_limit(self._settings)
        if limit is not None:
            options |= recompile_limit(limit, takes_options=not self._own_compile)
        return options

    def __call__(self, eager: Callable[..., Any], compiled: Callable[..., Any], region: str, state: Any) -> Any:
        from vllm_omni_diffusion_compile.compile.events import recorder
        from vllm_omni_diffusion_compile.compile.fallback import FallbackCallable
        from vllm_omni_diffusion_compile.compile.limit import with_room_for

        return FallbackCallable(
            eager, with_room_for(effective_recompile_limit(self._settings), compiled), self._latch(region),
            on_compile=recorder(self._path, region),
            hold=told_to_stop,
            state=state,
            fails_closed=self._fails_closed and self._ranks is None,
            ranks=self._ranks,
        )  # fmt: skip

    def setup_failed(self, region: str, error: Exception) -> None:
        """Say and record that `torch.compile` itself raised."""
        fallbacks.setup_failed(self._path, region, self._logger)(error)

    def _latch(self, region: str) -> Any:
        if region not in self._latches:
            self._latches[region] = fallbacks.latch(self._path, region, self._logger, raised=self._fails_closed)
            if self._ranks is not None:
                self._ranks.watch(self._latches[region])
        return self._latches[region]

    def _guarded(self, region: str, options: Mapping[str, Any]) -> Any:
        """One backend object for all blocks of a class: torch compiles once for those whose backends are the same."""
        from vllm_omni_diffusion_compile.compile.ranks import GuardedBackend, graph_compiler

        if region not in self._backends:
            assert self._ranks is not None
            compile_graph = graph_compiler(self._backend, options.get("mode"))
            self._backends[region] = GuardedBackend(compile_graph, self._ranks, self._latch(region))
        return self._backends[region]
