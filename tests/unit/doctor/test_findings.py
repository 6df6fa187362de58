"""What a finding has to say, and what it makes of the exit status."""

from __future__ import annotations

import pytest

from vllm_omni_diffusion_compile.doctor import Finding, exit_status


@pytest.mark.parametrize("state", ["limit", "broken"])
def test_what_is_wrong_has_a_remedy(state: str) -> None:
    with pytest.raises(ValueError, match="nothing says what to do"):
        Finding(name="cache", state=state, found="read-only")  # type: ignore[arg-type]


def test_the_worst_finding_is_the_exit_status() -> None:
    ok, unknown = Finding.ok("a", "b"), Finding.unknown("a", "b")
    limit, broken = Finding.limit("a", "b", "c"), Finding.broken("a", "b", "c")
    assert exit_status([]) == 0
    assert exit_status([ok, unknown]) == 0
    assert exit_status([ok, limit, unknown]) == 1
    assert exit_status([limit, broken, ok]) == 2
