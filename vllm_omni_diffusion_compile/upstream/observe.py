"""A worker that remembers what its components took and returned while it answered one request, and what really ran.

It is a worker extension, vLLM-Omni's own seam (`worker_extension_cls`). It watches components from outside: what is
compiled is called as a user's request calls it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni_diffusion_compile.compile.components import resolve
from vllm_omni_diffusion_compile.compile.events import LOG, compiled_graphs, summarize
from vllm_omni_diffusion_compile.upstream.asked import not_as_asked
from vllm_omni_diffusion_compile.upstream.combination import known_at_start

EXTENSION = f"{__name__}.Observer"

# Operators and kernels that compute attention, as the profiler names them.
_ATTENTION = re.compile(r"attention|attn|flash|fmha|vllm_fa\d|rainfusion", re.IGNORECASE)
# Inductor's kernels of other arithmetic have the names of what they were fused from, attention among them.
_FUSED = re.compile(r"triton_(poi|red|per)_")
# What torch records around each call of a compiled graph.
_COMPILED = "Torch-Compiled Region"
# Where a pipeline declares nothing.
_DITS, _ENCODERS, _VAES = ("transformer", "transformer_2"), ("text_encoder", "text_encoder_2"), ("vae",)
_DECODES = ("decode", "decode_latent", "decode_video")
# Where nn.Module looks for what calling a module does: set by `nn.Module.compile`, and by nobody else.
_CALL = "_compiled_call_impl"

_OBSERVED = "_diffusion_compile_observed"


class InFp32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Every half-precision type that an operation is told becomes fp32: a reference for models that cast themselves.

    Random numbers are drawn in the type that is asked for, and then become fp32: in another type they would be others.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation in fp32."""
        named = dict(kwargs or {})
        if "rand" in str(func) and not isinstance(next(iter(args), None), torch.Tensor):
            made = func(*args, **named)
            return _floated(made)
        return func(*map(_fp32, args), **{name: _fp32(value) for name, value in named.items()})


_HALF = (torch.bfloat16, torch.float16)


def _fp32(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value


def _floated(value: Any) -> Any:
    """What a component is called with, in fp32; mappings and sequences keep their kind."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, dict):
        return {name: _floated(item) for name, item in value.items()}
    return type(value)(map(_floated, value)) if type(value) in (list, tuple) else value


class Observer:
    """A worker extension; its methods are asked for by RPC."""

    def diffusion_compile_observe(self, in_fp32: bool) -> dict[str, Any]:
        """Watch from now on.

        Args:
            in_fp32: Compute what denoises and what decodes in fp32; text is encoded as ever.

        Returns:
            The fields of a row's key that are known without a request, and `scheduler`.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        attention = getattr(runner.od_config, "diffusion_attention_config", None)
        observed = Observed(runner.pipeline, in_fp32=in_fp32, attention=attention)
        setattr(self, _OBSERVED, observed)
        scheduler = getattr(runner.pipeline, "scheduler", None)
        facts = known_at_start(runner.od_config)
        return facts | {"scheduler": "the pipeline's own" if scheduler is None else type(scheduler).__name__}

    def diffusion_compile_observed(self, file: str) -> dict[str, Any]:
        """Stop watching, and write what was seen to an npz file.

        Returns:
            Fields of a row's trace; `packed`: rows of the sequence, where the model packs one; `not_as_asked`: where
            another attention backend computed than the one that was named.
        """
        observed: Observed = self.__dict__.pop(_OBSERVED)
        return observed.finish(Path(file) if _first_rank() else None)


def _first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class Observed:
    """What a pipeline's components took and returned.

    Args:
        pipeline: Whose components; they are as before once `finish` was called.
        in_fp32: See `Observer`.
        attention: `diffusion_attention_config` as vLLM-Omni has read it.
    """

    def __init__(self, pipeline: Any, *, in_fp32: bool = False, attention: Any = None) -> None:
        self._pipeline = pipeline
        self._attention = attention
        self._arrays: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, list[torch.Tensor]] = {}
        self._operators: Counter[str] = Counter()
        # Of the denoiser, and of decode: that one is compiled says nothing of the other.
        self._compiled: Counter[str] = Counter()
        self._decode_compiled: Counter[str] = Counter()
        self._packed: int | None = None
        self._inside = False
        self._in_fp32 = in_fp32
        self._undo: list[Callable[[], None]] = []
        for path, module in _named(pipeline, "_encoder_modules", _ENCODERS):
            self._watch_calls(path, module, self._encoder)
        for path, module in _named(pipeline, "_dit_modules", _DITS):
            self._watch_calls(path, module, self._denoiser)
            if in_fp32:
                module.float()
                _attend_in_fp32(module)
        for path, module in _named(pipeline, "_vae_modules", _VAES):
            if in_fp32:
                module.float()
            for method in (name for name in _DECODES if callable(getattr(module, name, None))):
                self._watch_method(module, method, functools.partial(self._decode, path))

    def finish(self, file: Path | None) -> dict[str, Any]:
        """Put everything back, write the arrays, and return the facts."""
        for undo in reversed(self._undo):
            undo()
        self._keep_changing_inputs()
        if file is not None:
            import numpy as np

            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in self._arrays.items()}
            np.savez(file, **arrays)
        events = summarize(LOG.since()[0])
        return {
            "attention": dict(Counter(type(layer.attention).__name__ for layer in _attention_layers(self._pipeline))),
            "operators": dict(self._operators),
            "compiled_calls": self._compiled.total(),
            "decode_compiled_calls": self._decode_compiled.total(),
            "compiled_graphs": compiled_graphs(),
            "fallbacks": sum(events.fallbacks.values()) + sum(events.limits.values()),
            "packed": self._packed,
            "not_as_asked": not_as_asked(_attention_layers(self._pipeline), self._attention, self._operators),
        }

    def _watch_calls(self, path: str, module: torch.nn.Module, watch: Callable[..., Any]) -> None:
        """Surround what calling a module does, be it compiled or not: a hook of the module would be compiled too."""
        before = vars(module).get(_CALL)
        call = before if before is not None else module._call_impl

        def undo() -> None:
            setattr(module, _CALL, before)

        setattr(module, _CALL, functools.partial(watch, path, call))
        self._undo.append(undo)

    def _watch_method(self, owner: Any, name: str, watch: Callable[..., Any]) -> None:
        own = name in vars(owner)
        method = getattr(owner, name)

        def undo() -> None:
            object.__setattr__(owner, name, method) if own else object.__delattr__(owner, name)

        # nn.Module's own way of setting an attribute looks at modules and parameters only.
        object.__setattr__(owner, name, functools.partial(watch, method))
        self._undo.append(undo)

    def _encoder(self, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        # The first of what may be the output of every layer.
        self._keep(f"component/{path}", itertools.islice(_floats(output), 1))
        return output

    def _denoiser(self, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for name, tensor in _sequences(args, kwargs):
            self._inputs.setdefault(f"{path}.{name}", []).append(_kept(tensor))
        self._packed = next((x.shape[1] for x in (kwargs.get("x"),) if isinstance(x, torch.Tensor)), self._packed)
        with self._traced(self._operators, self._compiled):
            output = self._run(call, args, kwargs)
        self._keep(f"component/{path}", _floats(output))
        return output

    def _decode(self, path: str, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # one way of decoding may use another one
            return decode(*args, **kwargs)
        self._inside = True
        try:
            self._keep(f"latents/decoded by {path}", _floats((args, kwargs)))
            with self._traced(Counter(), self._decode_compiled):
                output = self._run(decode, args, kwargs)
        finally:
            self._inside = False
        self._keep(f"component/{path}", _floats(output))
        return output

    def _keep(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Remember what the first call of this name had."""
        if not any(known == name or known.startswith(f"{name} ") for known in self._arrays):
            for number, tensor in enumerate(tensors):
                self._arrays[f"{name} {number}" if number else name] = _kept(tensor)

    def _keep_changing_inputs(self) -> None:
        """Of what the denoiser was called with, only latents change from step to step."""
        for name, calls in self._inputs.items():
            same = all(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.pairwise(calls))
            if not same:
                self._arrays |= {f"latents/{name} of call {n}": tensor for n, tensor in enumerate(calls, 1)}

    @contextmanager
    def _traced(self, operators: Counter[str], compiled: Counter[str]) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=kinds) as profiler:
            yield
        for event in profiler.key_averages():
            if event.key.startswith(_COMPILED):
                compiled[event.key] += event.count
            elif _ATTENTION.search(event.key) and not _FUSED.match(event.key):
                operators[event.key] += event.count

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._in_fp32:
            return call(*args, **kwargs)
        with InFp32():  # type: ignore[no-untyped-call]
            return call(*_floated(args), **_floated(kwargs))


def _named(pipeline: Any, declared: str, usual: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The components that a pipeline declares, each once."""
    seen: set[int] = set()
    for path in getattr(pipeline, declared, None) or usual:
        component = resolve(pipeline, path)
        parts = (
            enumerate(component) if isinstance(component, (list, tuple, torch.nn.ModuleList)) else ((None, component),)
        )
        for number, part in parts:
            if isinstance(part, torch.nn.Module) and id(part) not in seen:
                seen.add(id(part))
                yield path if number is None else f"{path}.{number}", part


def _attend_in_fp32(dit: torch.nn.Module) -> None:
    """Have vLLM-Omni's own fallback attend: kernels that are made for half precision refuse fp32."""
    from vllm_omni.diffusion.attention.layer import Attention

    for layer in dit.modules():
        if isinstance(layer, Attention) and layer.sdpa_fallback is not None:
            # Sparse attention stays: which blocks are chosen is part of what is asked for.
            replace_dense = getattr(layer.attention, "attend_densely_with", None)
            if replace_dense is not None:
                replace_dense(layer.sdpa_fallback)
            # SDPA takes fp32, and that of a platform may run where the fallback, made for no platform, does not.
            elif not isinstance(layer.attention, type(layer.sdpa_fallback)):
                layer.attention = layer.sdpa_fallback


def _attention_layers(pipeline: Any) -> list[Any]:
    from vllm_omni.diffusion.attention.layer import Attention

    modules = (module for _, dit in _named(pipeline, "_dit_modules", _DITS) for module in dit.modules())
    return [module for module in modules if isinstance(module, Attention)]


def _sequences(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating tensors of a denoiser's call that have rows: latents and embeddings, but no times."""
    for name, value in (*((str(number), arg) for number, arg in enumerate(args)), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1 and "time" not in name:
            yield name, value


def _floats(output: Any) -> Iterator[torch.Tensor]:
    """Every floating tensor in what a component takes or returns, in order."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _floats(value)
    elif hasattr(output, "__dict__") and not isinstance(output, torch.nn.Module):
        yield from _floats(vars(output))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
