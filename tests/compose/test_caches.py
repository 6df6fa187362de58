"""Step caches: they leave blocks out, which are compiled all the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.compose.engine import MARKS, Engine, assert_same, film, parameters

pytestmark = MARKS

# So lenient that the tiny models' steps are cached from the second on.
CACHE_DIT: dict[str, Any] = {
    "cache_backend": "cache_dit",
    "cache_config": {"max_warmup_steps": 1, "residual_diff_threshold": 10.0, "max_continuous_cached_steps": 2},
}
TEA_CACHE = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 10.0}}
MAG_CACHE = {
    "cache_backend": "mag_cache",
    "cache_config": {"mag_threshold": 10.0, "mag_max_skip_steps": 2, "mag_retention_ratio": 0.1},
}
REQUESTS: tuple[Mapping[str, Any], ...] = (
    {"steps": 8},
    {"steps": 8, "size": 192},
    {"steps": 8, "guidance_scale": 4.0},
    {"steps": 8},
)


@pytest.fixture(scope="module")
def uncached(klein: Path) -> list[np.ndarray]:
    with Engine(klein, compiled=False) as engine:
        return [engine.draw(**request) for request in REQUESTS]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(CACHE_DIT, id="cache-dit"),
        pytest.param(TEA_CACHE, id="teacache"),
        pytest.param(MAG_CACHE, id="magcache"),
    ],
)
def test_a_cached_picture_is_the_cached_eager_one(
    klein: Path, uncached: list[np.ndarray], options: dict[str, Any]
) -> None:
    with Engine(klein, compiled=False, **options) as engine:
        cached = [engine.draw(**request) for request in REQUESTS]
    assert not any(map(np.array_equal, cached, uncached)), "no step was cached"
    with Engine(klein, compiled=True, **options) as engine:
        warm = engine.graphs
        assert warm > 0
        assert_same([engine.draw(**request) for request in REQUESTS], cached)
        assert engine.graphs == warm, "compiled more after the dummy run"
        for block in engine.blocks:
            assert parameters(block.forward) == parameters(type(block).forward)[1:]


# MiniMax-H3 lets a request choose: the server's cache, a careful one ("high"), or none ("lossless").
TIERS: tuple[str | None, ...] = (None, "lossless", "high", None, "lossless", "high", "lossless", None)
H3_STEPS = 12


def test_requests_choose_their_cache(h3: Path) -> None:
    with Engine(h3, compiled=False, **CACHE_DIT) as engine:
        calls = engine.count_block_calls()
        eager, eager_calls = {}, {}
        for tier in dict.fromkeys(TIERS):
            calls.clear()
            eager[tier] = engine.film(quality=tier, steps=H3_STEPS)
            eager_calls[tier] = calls.total()
        assert eager_calls[None] < eager_calls["high"] < eager_calls["lossless"] == H3_STEPS * len(engine.blocks)
    with Engine(h3, compiled=True, **CACHE_DIT) as engine:
        calls = engine.count_block_calls()
        for tier in dict.fromkeys(TIERS):
            engine.film(quality=tier, steps=H3_STEPS)
        warm = engine.graphs
        assert warm > 0
        for tier in TIERS:
            calls.clear()
            assert_same([engine.film(quality=tier, steps=H3_STEPS)], [eager[tier]])
            assert calls.total() == eager_calls[tier], f"quality {tier!r} cached other steps than eagerly"
        assert engine.graphs == warm, "a change of tiers compiled more"

        # One runs, the others wait: the running one and a waiting one are aborted.
        requests = [engine.request(**film(quality=tier, steps=H3_STEPS)) for tier in TIERS]
        requests[0].sampling_params.num_inference_steps = 100 * H3_STEPS  # it will not have ended when it is aborted
        drawn = engine.together(requests, abort=(0, 4))
        assert [index for index, picture in enumerate(drawn) if picture is None] == [0, 4]
        answered = [(picture, eager[tier]) for picture, tier in zip(drawn, TIERS, strict=True) if picture is not None]
        assert_same([picture for picture, _ in answered], [reference for _, reference in answered])
        calls.clear()
        (uncached,) = engine.together([engine.request(**film(quality="lossless", steps=H3_STEPS))])
        assert uncached is not None
        assert_same([uncached], [eager["lossless"]])
        assert calls.total() == eager_calls["lossless"]
        assert engine.graphs == warm, "concurrent tiers compiled more"
