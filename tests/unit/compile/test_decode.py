"""Decode that is compiled where that is faster."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_omni_diffusion_compile.compile import decode as decode_module
from vllm_omni_diffusion_compile.compile.decode import ChosenDecode, Measured, Rules

SLOW_S = 0.02
Z = torch.zeros(1, 4, 8, 8)
WIDE = torch.zeros(1, 4, 8, 16)


class Vae:
    """Says which way it was decoded. `memory` is the widest latent that fits at once; tiles always do."""

    def __init__(self, *, eager_s: float = 0.0, memory: int = 1000) -> None:
        self.eager_s, self.memory = eager_s, memory
        self.use_tiling = False
        self.calls: list[str] = []

    def enable_tiling(self) -> None:
        self.use_tiling = True

    def decode(self, z: torch.Tensor) -> str:
        if z.shape[-1] > self.memory and not self.use_tiling:
            raise torch.OutOfMemoryError("out of memory")
        time.sleep(self.eager_s)
        self.calls.append("eager")
        return "tiled" if self.use_tiling else "eager"


class Compiled:
    """Compiles at the first call of each shape."""

    def __init__(self, vae: Vae, compiled_s: float = 0.0, *, memory: int = 1000) -> None:
        self._vae, self._compiled_s, self._memory = vae, compiled_s, memory
        self._shapes: set[torch.Size] = set()
        self.latched = False

    @property
    def graphs(self) -> int:
        return len(self._shapes)

    def __call__(self, z: torch.Tensor) -> str:
        if z.shape[-1] > self._memory and not self._vae.use_tiling:
            raise torch.OutOfMemoryError("out of memory")
        self._shapes.add(z.shape)
        time.sleep(self._compiled_s)
        self._vae.calls.append("compiled")
        return "compiled"


class Handed:
    """What was compiled, called by way of something else."""

    def __init__(self, compiled: Compiled, call: Callable[[torch.Tensor], str]) -> None:
        self._compiled, self._call = compiled, call
        self.latched = False

    @property
    def graphs(self) -> int:
        return self._compiled.graphs

    def __call__(self, z: torch.Tensor) -> str:
        return self._call(z)


class State:
    """What the rules ask for and tell."""

    def __init__(self) -> None:
        self.ready = self.declared = False
        self.measured: list[Measured] = []
        self.tiled: list[str] = []

    def rules(self, **rules: Any) -> Rules:
        return Rules(
            ready=lambda: self.ready, declared=lambda: self.declared, told=self.measured.append,
            tiled=self.tiled.append, **rules,
        )  # fmt: skip


@pytest.fixture
def state() -> State:
    return State()


@pytest.mark.parametrize(
    ("eager_s", "compiled_s", "way"), [(SLOW_S, 0.0, "compiled"), (0.0, SLOW_S, "eager"), (SLOW_S, SLOW_S, "eager")]
)
def test_the_faster_way_is_kept(state: State, eager_s: float, compiled_s: float, way: str) -> None:
    vae = Vae(eager_s=eager_s)
    decode = ChosenDecode(vae.decode, Compiled(vae, compiled_s), state.rules(), vae)
    assert decode(Z) == "compiled"
    assert not state.measured  # it was compiled in this call
    decode(Z)
    (measured,) = state.measured
    assert (measured.way, measured.shape, measured.static) == (way, "float32[1, 4, 8, 8]", False)
    assert measured.eager_s == pytest.approx(eager_s, abs=SLOW_S / 2)
    assert measured.compiled_s == pytest.approx(compiled_s, abs=SLOW_S / 2)
    assert decode(Z) == way
    state.ready = True
    assert decode(Z) == way
    assert decode(WIDE) == way  # what all shapes share is known from the one that was measured


def test_nothing_is_measured_unless_asked(state: State) -> None:
    vae = Vae()
    decode = ChosenDecode(vae.decode, Compiled(vae, SLOW_S), state.rules(measure=False), vae)
    assert [decode(Z) for _ in range(3)] == ["compiled"] * 3
    assert not state.measured
    assert vae.calls == ["compiled"] * 3


def test_a_user_never_waits_for_a_measurement(state: State) -> None:
    vae = Vae()
    decode = ChosenDecode(vae.decode, Compiled(vae, SLOW_S), state.rules(), vae)
    decode(Z)
    state.ready = True
    decode(Z)
    assert not state.measured
    assert vae.calls == ["compiled"] * 2


def test_each_declared_shape_has_a_graph_of_its_own_and_no_other_is_compiled(state: State) -> None:
    vae = Vae(eager_s=SLOW_S)
    made: list[Compiled] = []

    def static() -> Compiled:
        made.append(Compiled(vae))
        return made[-1]

    decode = ChosenDecode(vae.decode, None, state.rules(static=static), vae)
    assert decode(Z) == "eager"  # the release's own dummy run, which nobody declared
    assert not made
    state.declared = True
    assert decode(Z) == "compiled"
    assert len(state.measured) == 1  # at once, so that the next request tells what a user's will take
    assert [decode(latents) for latents in (Z, WIDE, WIDE)] == ["compiled"] * 3
    assert [one.graphs for one in made] == [1, 1]
    assert [measured.shape for measured in state.measured] == ["float32[1, 4, 8, 8]", "float32[1, 4, 8, 16]"]
    assert [measured.static for measured in state.measured] == [True, True]
    assert decode.graphs == 2
    state.ready, state.declared = True, False
    assert [decode(Z), decode(WIDE), decode(Z.double())] == ["compiled", "compiled", "eager"]
    assert len(made) == 2


def test_a_graph_that_cannot_be_set_up_leaves_its_shape_eager(state: State) -> None:
    vae = Vae()
    decode = ChosenDecode(vae.decode, None, state.rules(static=lambda: None), vae)
    state.declared = True
    assert [decode(Z), decode(Z)] == ["eager", "eager"]
    assert not state.measured


def test_eager_that_runs_out_of_memory_where_compiled_does_not_is_not_chosen(state: State) -> None:
    vae = Vae(memory=4)
    decode = ChosenDecode(vae.decode, Compiled(vae, SLOW_S), state.rules(), vae)
    decode(Z)
    decode(Z)
    (measured,) = state.measured
    assert (measured.way, measured.eager_s) == ("compiled", float("inf"))


@pytest.mark.parametrize(("eager_fits", "way"), [(True, "eager"), (False, "compiled")])
def test_a_measurement_that_does_not_fit_beside_the_result_does_not_fail_the_request(
    state: State, eager_fits: bool, way: str
) -> None:
    vae = Vae(memory=1000 if eager_fits else 4)
    compiled = Compiled(vae)

    def fits_once(z: torch.Tensor) -> str:
        if vae.calls.count("compiled") == 2:  # the first call compiled; this is the one that is measured
            raise torch.OutOfMemoryError("out of memory")
        return Compiled.__call__(compiled, z)

    decode = ChosenDecode(vae.decode, Handed(compiled, fits_once), state.rules(), vae)
    assert [decode(Z), decode(Z)] == ["compiled", "compiled"]
    (measured,) = state.measured
    assert (measured.way, measured.compiled_s) == (way, float("inf"))
    assert not state.tiled


def test_decode_that_runs_out_of_memory_is_tiled_for_this_shape_and_says_so_once(state: State) -> None:
    vae = Vae(memory=8)
    decode = ChosenDecode(vae.decode, Compiled(vae, memory=8), state.rules(), vae)
    state.ready = True
    assert [decode(WIDE), decode(WIDE)] == ["tiled", "tiled"]
    assert state.tiled == ["float32[1, 4, 8, 16]"]
    assert not vae.use_tiling
    assert decode(Z) == "compiled"


def test_without_tiling_the_error_is_the_callers(state: State) -> None:
    vae = Vae(memory=4)
    for component in (None, vae):
        vae.use_tiling = component is vae  # on already: there is nothing left to try
        vae.memory = 4 if component is None else -1

        def out_of_memory(z: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("out of memory")

        with pytest.raises(torch.OutOfMemoryError):
            ChosenDecode(out_of_memory, None, state.rules(), component)(Z)
    assert not state.tiled


def test_all_ranks_keep_what_is_faster_in_sum(state: State) -> None:
    vae = Vae(eager_s=SLOW_S)
    decode = ChosenDecode(vae.decode, Compiled(vae), state.rules(), vae)
    decode(Z)
    decode(Z)
    (own,) = decode.measured
    assert own.way == "compiled"
    other = replace(own, eager_s=1.0, compiled_s=2.0, way="eager")
    decode.agree([[own], [other]])
    assert decode(Z) == "eager"
    assert decode(WIDE) == "eager"  # by what all ranks know, not by what this one measured


def test_a_slow_decode_is_measured_once(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "_LONGEST_S", 0.0)
    vae = Vae(eager_s=SLOW_S)
    decode = ChosenDecode(vae.decode, Compiled(vae), state.rules(), vae)
    decode(Z)
    vae.calls.clear()
    decode(Z)
    assert vae.calls == ["compiled", "compiled", "eager"]  # the request, and one of each


def test_it_is_known_by_the_name_and_the_copy_of_what_it_stands_for(state: State) -> None:
    vae = Vae()
    decode: Callable[..., Any] = ChosenDecode(vae.decode, Compiled(vae), state.rules(), vae)
    assert decode.__name__ == "decode"
    assert copy.copy(decode)(Z) == "eager"
