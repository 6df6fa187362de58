"""What has to hold of the numbers, and what they say in words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo.arms import SIZES, Measured


@dataclass(frozen=True)
class Expected:
    """What the flags of our arm leave switched on.

    Args:
        compiled: Compilation at all.
        regional: Of repeated blocks, not of the whole transformer.
        vae: Of VAE decode; the warmup requests belong to it.
    """

    compiled: bool = True
    regional: bool = True
    vae: bool = True


def expected(flags: Sequence[str]) -> Expected:
    """Read from the flags of `vllm serve` what to expect; those of no interest here are skipped."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--diffusion-compile-vae", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--diffusion-compile-granularity", default="regional")
    try:
        options, _ = parser.parse_known_args([_dashed(flag) for flag in flags])
    except argparse.ArgumentError:
        return Expected()  # vLLM refuses them with a better message
    compiled = not options.enforce_eager
    return Expected(
        compiled=compiled,
        regional=compiled and options.diffusion_compile_granularity == "regional",
        vae=compiled and options.diffusion_compile_vae,
    )


def problems(measured: Measured) -> list[str]:
    """List what must not be, in sentences; nothing is demanded of stock but to serve."""
    if not measured.arm.ours:
        return []
    found = []
    compiled, expect = measured.compiled, expected(measured.arm.flags)
    if compiled.after and expect.vae:
        found.append(f"{compiled.after} compilation(s) after ready, expected none: the warmup missed something")
    if not compiled.transformer_functions and expect.compiled:
        found.append("torch compiled no function of the transformer, expected at least one")
    if not measured.regions and expect.regional:
        found.append("vLLM-Omni's log names no regionally compiled module, expected at least one")
    if not compiled.vae_functions and expect.vae:
        found.append("torch compiled no VAE decode, expected at least one")
    return [f"{measured.arm.title}: {sentence}" for sentence in found]


def sentences(ours: Measured, stock: Measured) -> list[str]:
    """Say what the numbers of a pair show, and nothing else."""
    said = [
        *(_waits(measured) for measured in (stock, ours)),
        f"Ready after {ours.ready_s:.0f} s with this package, after {stock.ready_s:.0f} s without it.",
    ]
    if not expected(ours.arm.flags).vae:
        said.append("The flags switched compiled VAE decode off, and the warmup requests, which belong to it, as well.")
    return said


def _waits(measured: Measured) -> str:
    who = "With this package" if measured.arm.ours else "Stock vLLM-Omni:"
    times = ", ".join(
        f"{measured.first_s[size]:.1f} s at {size} (median of the next ones: {measured.median_s[size]:.2f} s)"
        for size in SIZES
    )
    after = measured.compiled.after
    what = "nothing was compiled" if after == 0 else f"{after} compilation{'s' if after > 1 else ''} ran"
    return f"{who} {what} after the server was ready; the first request took {times}."


def _dashed(flag: str) -> str:
    """Spell a flag with dashes; vLLM takes underscores for them."""
    name, equals, value = flag.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if flag.startswith("--") else flag
