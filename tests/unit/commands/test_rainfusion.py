import json

import pytest

from vllm_omni_diffusion_compile.commands.main import main

KEYS = {
    "video_rows", "residue", "suffix", "promoted", "sparse_rows", "sparse_blocks", "protected_blocks", "dense_reason",
    "density_low", "density_high",
}  # fmt: skip


def _facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main(["rainfusion", *arguments, "--json"]) == 0
    facts: dict[str, float] = json.loads(capsys.readouterr().out)
    assert set(facts) == KEYS
    return facts


@pytest.mark.parametrize("arguments", [("62,24,42",), ("--shape", "1344x768", "--seconds", "8.7")])
def test_the_worked_example(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    facts = _facts(capsys, *arguments, "--prefix", "710")
    wanted = {
        "video_rows": 62496, "residue": 32, "suffix": 2928, "promoted": 2976, "sparse_rows": 59520,
        "sparse_blocks": 465, "protected_blocks": 494 - (465 - 8), "dense_reason": None,
    }  # fmt: skip
    assert {name: facts[name] for name in wanted} == wanted
    # 37 of 494 blocks are dense; the others choose 99, of which all or none of the 37 may be
    assert facts["density_low"] == pytest.approx((37 * 494 + 457 * 99) / 494**2)
    assert facts["density_high"] == pytest.approx((37 * 494 + 457 * 136) / 494**2)


@pytest.mark.parametrize(
    ("shape", "seconds", "rows"),
    [("1344x768", "5.1", 37 * 24 * 42), ("1344x768", "5.2", 42 * 24 * 42), ("700x400", "8.7", 62 * 12 * 21)],
)
def test_a_shape_is_cut_to_whole_rows_and_a_length_rounded_up_to_whole_chunks(
    capsys: pytest.CaptureFixture[str], shape: str, seconds: str, rows: int
) -> None:
    assert _facts(capsys, "--shape", shape, "--seconds", seconds)["video_rows"] == rows


@pytest.mark.parametrize(
    ("arguments", "reason"), [(("4,16,10",), "32 blocks"), (("62,24,40", "--sparsity", "0"), "sparsity is 0")]
)
def test_a_resolution_that_stays_dense_says_why(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    facts = _facts(capsys, *arguments)
    assert reason in str(facts["dense_reason"])
    assert facts["density_low"] == facts["density_high"] == 1


def test_the_table_explains_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rainfusion", "62,24,42"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in KEYS)
    assert "59520" in printed and "latent grid 62,24,42" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either T,H,W"),
        (("62,24,42", "--shape", "64x64"), "either T,H,W"),
        (("62,24",), "T,H,W is '62,24'"),
        (("62,0,42",), "T,H,W is '62,0,42'"),
        (("62,24,42", "--seconds", "3"), "--seconds goes with --shape"),
        (("--shape", "64x31", "--seconds", "3"), "--shape is '64x31'"),
        (("--shape", "64x64"), "--seconds is None"),
        (("62,24,42", "--prefix", "-1"), "--prefix is -1"),
        (("62,24,42", "--sparsity", "1.2"), "--sparsity is 1.2"),
    ],
)
def test_what_cannot_be_is_named(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert main(["rainfusion", *arguments]) == 2
    assert message in capsys.readouterr().err
