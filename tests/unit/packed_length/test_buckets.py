"""Choosing a packed length, and the settings it is chosen from."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_diffusion_compile.errors import RequestError, SettingError
from vllm_omni_diffusion_compile.packed_length.buckets import Buckets, check_pin, check_pin_holds
from vllm_omni_diffusion_compile.settings import read_config

MAX_ROWS = 2**20
EXAMPLES = 100_000


def buckets(setting: object) -> Buckets:
    read = read_config({"pad_seq_buckets": setting}).pad_seq_buckets
    assert read is not None
    return Buckets.of(read)


def _random_setting(draw: random.Random) -> Any:
    lengths = [
        draw.choice((draw.randrange(1, 2**14) * 64, draw.randrange(1, 2**14) * 64, draw.randrange(-100, 2**21)))
        for _ in range(draw.randrange(1, 5))
    ]
    rule = {"from": draw.randrange(1, 2**17), "to": draw.randrange(1, 2**20), "waste": draw.uniform(0.03, 0.9)}
    setting: Any = draw.choice((lengths, {"lengths": lengths}, rule))
    if isinstance(setting, dict) and draw.random() < 0.5:
        setting = {**setting, "over": draw.choice(("round", "reject"))}
    return setting


def test_a_hundred_thousand_settings_and_requests() -> None:
    draw = random.Random(5)
    chosen = refused = 0
    for _ in range(EXAMPLES // 20):
        try:
            made = buckets(_random_setting(draw))
        except SettingError:
            refused += 1
            continue
        for _ in range(20):
            used = draw.choice((draw.randrange(1, 2**17), draw.randrange(1, 2**20 + 2000)))
            above = bisect_left(made.lengths, used)
            try:
                choice = made.choose(used)
            except RequestError as refused_request:
                status = refused_request.status
                wanted = made.over == "reject" or used > MAX_ROWS
                assert (above, status, wanted) == (len(made.lengths), 413, True)
                continue
            chosen += 1
            assert choice.length >= used and choice.length % 64 == 0
            assert choice.over == (above == len(made.lengths))
            assert choice.length == (-(-used // 64) * 64 if choice.over else made.lengths[above])
    assert chosen > EXAMPLES // 3 and refused > 100, "the examples are not what they were meant to be"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_other_value_is_refused_by_name(value: Any) -> None:
    try:
        setting = read_config({"pad_seq_buckets": value}).pad_seq_buckets
    except SettingError as error:
        assert "pad_seq_buckets" in str(error)  # noqa: PT017 - most values are refused, some are fine
    else:
        assert setting is None or setting.rows == tuple(sorted(value))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ([64, 100], r"pad_seq_buckets.lengths\[1\] is 100, expected a multiple of 64, such as 64 or 128"),
        ([64, True], r"lengths\[1\] is True, expected a whole number"),
        (["64"], r"lengths\[0\] is '64' \(str\), expected a whole number"),
        ([0], r"lengths\[0\] is 0, expected a positive multiple of 64"),
        ([2**21], r"lengths\[0\] is 2097152, expected at most 1048576 rows"),
        ([64, 128, 64], "in which 64 stands more than once"),
        ([], "expected at least one entry"),
        (16384, "is 16384, expected a list of multiples of 64 such as .*, or a mapping"),
        ({"from": 1, "to": 2}, "which lacks waste; expected lengths, or all of from, to and waste"),
        ({"form": 1}, "unknown key 'diffusion_compile_config.pad_seq_buckets.form'; did you mean 'from'"),
        ({"lengths": [64], "to": 64}, "which has both lengths and to; leave one of the two out"),
        ({"from": 128, "to": 64, "waste": 0.5}, "whose from, 128, is more than its to, 64"),
        ({"from": 64, "to": 128, "waste": 0}, "pad_seq_buckets.waste is 0, expected more than 0"),
        ({"from": 64, "to": 128, "waste": 1.0}, "pad_seq_buckets.waste is 1.0, expected less than 1"),
        ({"from": 65, "to": 128, "waste": 0.1}, "the shortest packed length for 65 row.* is 128, and 0.4922 of that"),
        ({"lengths": [64], "over": "drop"}, "pad_seq_buckets.over is 'drop' .*expected 'round' or 'reject'"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong_and_where(setting: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        buckets(setting)


@pytest.mark.parametrize(
    "rule",
    [
        {"from": 16384, "to": 65536, "waste": 0.06},
        {"from": 640, "to": 1280, "waste": 0.5},
        {"from": 700, "to": 4000, "waste": 0.1},
        {"from": 64, "to": 64, "waste": 0.001},
    ],
)
def test_a_rule_keeps_its_waste_with_the_fewest_lengths(rule: dict[str, Any]) -> None:
    made = buckets(rule)
    first, last, waste = rule["from"], rule["to"], rule["waste"]
    for used in range(first, last + 1):
        length = made.choose(used).length
        assert (length - used) / length <= waste + 1e-12
    # From the other end: the longest length, then the next one down that the rule still allows.
    needed, top = 1, -(-last // 64) * 64
    while (top - first) / top > waste:
        top = min(length for length in range(64, top, 64) if (top - (length + 1)) / top <= waste)
        needed += 1
    assert len(made.lengths) == needed


def test_the_example_of_the_documentation() -> None:
    assert len(buckets({"from": 16384, "to": 65536, "waste": 0.06}).lengths) == 23


def test_rank_counts_that_cannot_share_a_bucket() -> None:
    made = Buckets((384, 640))
    made.refuse_indivisible(1)
    made.refuse_indivisible(2)
    made.refuse_indivisible(128)  # 384 = 3 * 128 and 640 = 5 * 128
    with pytest.raises(SettingError, match="has 640, which 3 ranks .* expected multiples of 192, such as 576 or 768"):
        made.refuse_indivisible(3)


@pytest.mark.parametrize(
    ("pin", "status", "message"),
    [
        (True, 400, r"pad_seq_len is True \(bool\), expected a whole number"),
        ("2048", 400, r"pad_seq_len is '2048' \(str\), expected a whole number"),
        (2048.0, 400, r"pad_seq_len is 2048.0 \(float\), expected a whole number"),
        ([2048], 400, r"pad_seq_len is \[2048\] \(list\), expected a whole number"),
        (0, 400, "pad_seq_len is 0, expected a positive multiple of 64"),
        (-64, 400, "pad_seq_len is -64, expected a positive multiple of 64"),
        (63, 400, "pad_seq_len is 63, expected a multiple of 64, such as 64"),
        (2000, 400, "pad_seq_len is 2000, expected a multiple of 64, such as 1984 or 2048"),
        (1024, 400, "pad_seq_len is 1024, expected at least 1088: size and length of the video alone take 1025 rows"),
        (2**20 + 64, 413, "pad_seq_len is 1048640, expected at most 1048576 rows"),
        pytest.param(10**5000, 413, "is a number of more than 30 digits, expected at most 1048576", id="too long"),
        pytest.param(-(10**5000), 400, "is a number of more than 30 digits, expected a positive", id="too negative"),
        ("x" * 10**5, 400, r"pad_seq_len is 'xxx.*\.\.\. \(str\)"),
    ],
)
def test_a_bad_pin_is_refused_with_its_value(pin: object, status: int, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        check_pin(pin, 1025)
    assert refused.value.status == status and len(str(refused.value)) < 250


def test_a_good_pin_is_taken_and_one_that_the_prompt_makes_too_small_is_not() -> None:
    assert check_pin(2**20, 1025) == 2**20
    check_pin_holds(1088, 1088)
    with pytest.raises(RequestError, match="pad_seq_len is 1088, expected at least 1152: .* has 1089 rows") as refused:
        check_pin_holds(1088, 1089)
    assert refused.value.status == 400
