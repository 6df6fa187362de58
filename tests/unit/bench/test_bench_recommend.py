from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bench.results import Blocks, metric, result
from vllm_omni_diffusion_compile.bench.figures import figures, slower
from vllm_omni_diffusion_compile.bench.recommend import recommend


def flat(*seconds: float) -> Blocks:
    """One shape a value, with so little noise that it does not matter."""
    return [[[value * 0.999, value, value * 1.001]] * 2 for value in seconds]


def test_the_faster_arm_with_the_gain_the_noise_and_the_command() -> None:
    advice = recommend(
        result({"eager": flat(1.0), "regional-dynamic": flat(0.8)}, {"eager": (10, 10), "regional-dynamic": (50, 14)})
    )
    assert advice.arm == "regional-dynamic"
    text = " ".join(advice.sentences)
    assert "a request to regional-dynamic takes 20.0% less time than to eager, with a noise of 0.2%" in text
    # 40 s and 4 s over 0.2 s a request.
    assert "40 s longer cold, made up for after 200 requests; 4 s longer warm, made up for after 20 requests" in text
    assert advice.command is not None
    assert shlex.split(advice.command) == [
        *("vllm", "serve", "MODEL", "--omni", "--diffusion-compile-granularity", "regional"),
        *("--diffusion-compile-dynamic", "--no-diffusion-compile-vae"),
        *("--diffusion-compile-config", '{"warmup": {"shapes": ["64x64"]}}'),
    ]


def test_eager_where_it_is_best() -> None:
    advice = recommend(result({"eager": flat(1.0), "regional-dynamic": flat(1.1)}))
    assert advice.arm == "eager"
    assert "eager is best: a request to eager takes 9.1% less time than to regional-dynamic" in advice.sentences[0]
    assert advice.command == "vllm serve MODEL --omni --enforce-eager"


def test_eager_where_the_difference_is_noise() -> None:
    noisy = [[[0.8, 0.95, 1.1]] * 2]
    advice = recommend(result({"eager": flat(1.0), "regional-dynamic": noisy}))
    assert advice.arm == "eager"
    assert "the difference is within noise (a request to regional-dynamic takes 5.0% less time" in advice.sentences[0]


def test_eager_is_not_called_best_for_less_than_the_noise() -> None:
    noisy = [[[0.9, 1.01, 1.1]] * 2]
    advice = recommend(result({"eager": flat(1.0), "regional-dynamic": noisy}))
    assert advice.arm == "eager"
    assert "the difference is within noise (a request to eager takes 1.0% less time" in advice.sentences[0]


def test_of_arms_that_are_not_told_apart_the_one_that_is_ready_soonest() -> None:
    arms = {"eager": flat(1.0), "full-dynamic": flat(0.5), "regional-dynamic": flat(0.5005)}
    ready = {"eager": (9, 9), "full-dynamic": (90, 40), "regional-dynamic": (60, 20)}
    advice = recommend(result(arms, ready))
    assert advice.arm == "regional-dynamic"
    assert any("full-dynamic is not told apart from it" in sentence for sentence in advice.sentences)


def test_an_arm_that_compiled_after_ready_is_passed_over_and_else_said() -> None:
    arms = {"eager": flat(1.0), "full-dynamic": flat(0.5), "regional-dynamic": flat(0.5)}
    made = result(arms, {"eager": (9, 9), "full-dynamic": (90, 20), "regional-dynamic": (90, 40)})
    for start in made.starts_of("full-dynamic"):
        start.metrics = [metric("compilations", 1, after=True)]
    assert recommend(made).arm == "regional-dynamic"
    made.arms.pop()
    advice = recommend(made)
    assert advice.arm == "full-dynamic"
    assert any("compiled 2 graph(s) after it was ready" in sentence for sentence in advice.sentences)


def test_a_shape_that_gets_slower_is_named() -> None:
    advice = recommend(result({"eager": flat(1.0, 1.0), "full-dynamic": flat(0.5, 1.2)}))
    assert advice.arm == "full-dynamic"
    assert any("At 128x64 eager takes 16.7% less time than full-dynamic" in sentence for sentence in advice.sentences)


def test_what_was_not_measured_completely_is_never_recommended() -> None:
    made = result({"eager": flat(1.0), "regional-dynamic": flat(0.9), "full-dynamic": flat(0.1)})
    made.arms[2].not_measured = "it died"
    advice = recommend(made)
    assert advice.arm == "regional-dynamic"
    assert "full-dynamic is out of account: it was not measured completely." in advice.sentences
    made.arms[1].not_measured = "it died, too"
    advice = recommend(made)
    assert advice.arm is None and advice.command is None
    assert advice.sentences[0] == "Nothing is recommended: only eager was measured completely."


def test_without_eager_it_says_that_eager_is_not_known() -> None:
    advice = recommend(result({"regional-dynamic": flat(1.0), "full-dynamic": flat(0.5)}))
    assert advice.arm == "full-dynamic"
    assert any("whether compiling pays at all is not known" in sentence for sentence in advice.sentences)


def test_rainfusion_is_told_and_not_chosen() -> None:
    arms = {"eager": flat(1.0), "full-dynamic": flat(0.8), "full-dynamic+rainfusion": flat(0.4)}
    advice = recommend(result(arms))
    assert advice.arm == "full-dynamic"
    assert any(
        "full-dynamic+rainfusion is faster" in sentence and "look at it" in sentence for sentence in advice.sentences
    )


NAMES = ("eager", "regional-dynamic", "regional-static", "full-dynamic", "full-static+vae")
SECONDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


@given(
    st.integers(1, 2).flatmap(
        lambda shapes: st.dictionaries(
            st.sampled_from(NAMES),
            st.lists(st.lists(SECONDS, min_size=2, max_size=2), min_size=shapes, max_size=shapes),
            min_size=2,
        )
    )
)
def test_no_recommended_arm_is_slower_than_another_outside_of_noise(arms: dict[str, Blocks]) -> None:
    made = result(arms)
    advice = recommend(made)
    measured = {arm.name: arm for arm in figures(made)}
    assert advice.arm in measured
    assert not any(slower(measured[advice.arm], other) for other in measured.values())
