"""Warmup through the ordinary request path: one request, then further sizes until decode compiles nothing for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_omni_diffusion_compile.warmup.plan import FIRST, FURTHER, Size


@dataclass(frozen=True)
class CompileFacts:
    """What the workers have compiled so far.

    Args:
        graphs: Graphs compiled in all.
        decodes: VAE decodes that are compiled and have not fallen back.
        decode_graphs: Graphs compiled during VAE decode.
    """

    graphs: int
    decodes: int
    decode_graphs: int


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """One warmup request.

    Args:
        size: What it asked for.
        steps: Denoise steps it asked for.
        seconds: How long it took.
        error: Why it failed; None if it did not.
        graphs: Graphs compiled while it ran; None if the workers could not be asked.
        decode_graphs: The same during VAE decode.
    """

    size: Size
    steps: int
    seconds: float
    error: str | None
    graphs: int | None
    decode_graphs: int | None


Send = Callable[[Size, int], str | None]
Ask = Callable[[], CompileFacts | None]


def first_request(send: Send, ask: Ask, dummy_steps: int) -> Iterator[Warmed]:
    """Send the first request with one denoise step; if that is refused, once more with as many as the dummy run takes.

    Args:
        send: Sends a request of a size and a number of steps and waits for it; returns its error, or None.
        ask: Asks the workers what they have compiled; None if they cannot be asked.
        dummy_steps: Denoise steps of the release's own dummy run.

    Yields:
        Each request after it ended; the last one decides.
    """
    for steps in dict.fromkeys((1, dummy_steps)):
        warmed = _request(send, ask, FIRST, steps)
        yield warmed
        if warmed.error is None:
            return


def further_requests(send: Send, ask: Ask, steps: int) -> Iterator[Warmed]:
    """Send requests of further sizes until one of them compiled nothing in decode, or failed.

    Nothing is sent when no decode is compiled, or when the workers cannot be asked: then nothing would say when to
    stop.
    """
    for size in FURTHER:
        facts = ask()
        if facts is None or facts.decodes == 0:
            return
        warmed = _request(send, ask, size, steps)
        yield warmed
        if warmed.error is not None or not warmed.decode_graphs:
            return


def _request(send: Send, ask: Ask, size: Size, steps: int) -> Warmed:
    before = ask()
    start = time.perf_counter()
    error = send(size, steps)
    seconds = time.perf_counter() - start
    after = ask()
    known = before is not None and after is not None
    return Warmed(
        size=size,
        steps=steps,
        seconds=seconds,
        error=error,
        graphs=after.graphs - before.graphs if known else None,  # type: ignore[union-attr]
        decode_graphs=after.decode_graphs - before.decode_graphs if known else None,  # type: ignore[union-attr]
    )
