"""The mapping `warmup`: shapes in every way of writing them, and what is wrong with those that are none."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import (
    DiffusionCompileSettings,
    Lora,
    Shape,
    effective_recompile_limit,
    plain_config,
    read_config,
)
from vllm_omni_diffusion_compile.settings.config import STATIC_RECOMPILE_LIMIT

FULL: dict[str, Any] = {
    "width": 64,
    "height": 64,
    "frames": 107,
    "steps": 4,
    "guidance_scale": 4,
    "images": 1,
    "prompt_rows": 77,
}


def shapes(*given: Any) -> list[Shape]:
    return list(read_config({"warmup": {"shapes": list(given)}}).warmup.shapes)


def test_a_text_stands_for_a_mapping() -> None:
    assert shapes("1344x768x209", "1024x1024", FULL | {"extra_args": {"task": "fl2va"}}) == [
        Shape(width=1344, height=768, frames=209),
        Shape(width=1024, height=1024),
        Shape(**FULL, extra_args={"task": "fl2va"}),
    ]


def test_what_a_dotted_flag_gives_is_a_list() -> None:
    assert read_config({"warmup": {"shapes": "64x64,96x64x9"}}).warmup.shapes == shapes("64x64", "96x64x9")


def test_it_travels_as_plain_data_and_says_the_same_when_it_arrives() -> None:
    plain = plain_config({"warmup": {"shapes": ["64x64", FULL | {"images": ["320x256"]}], "budget_s": 60}})
    assert plain is not None and plain["warmup"]["shapes"][0] == {"width": 64, "height": 64}
    assert plain_config(plain) == plain
    assert read_config(plain).warmup.shapes[1].image_sizes == [(320, 256)]
    # What was not said can still be said by another source.
    assert "on_failure" not in plain["warmup"]


def test_input_pictures_have_the_requests_size_unless_they_have_their_own() -> None:
    (shape,) = shapes({"width": 64, "height": 32, "images": 2})
    assert shape.image_sizes == [(64, 32), (64, 32)]


def test_a_request_may_leave_its_size_to_the_model() -> None:
    bare, edit = shapes({}, {"steps": 4, "images": ["64x32"]})
    assert (bare.size, bare.width, bare.height) == (None, None, None)
    assert str(bare) == "the model's own size"
    assert edit.image_sizes == [(64, 32)]


def adapted(**lora: Any) -> dict[str, Any]:
    return {"width": 64, "height": 64, "lora": {"path": "/adapters/style"} | lora}


def test_an_adapter_is_named_as_a_request_names_it() -> None:
    plain, full = shapes(adapted(), adapted(name="mine", scale=2, int_id=7))
    assert plain.lora is not None and full.lora is not None
    # A request does not do without a name.
    assert plain.lora.as_request == {"name": "style", "path": "/adapters/style"}
    assert full.lora.as_request == {"name": "mine", "path": "/adapters/style", "scale": 2.0, "int_id": 7}
    assert (str(plain), str(full)) == ("64x64 (lora=/adapters/style)", "64x64 (lora=mine)")
    travelled = plain_config({"warmup": {"shapes": [adapted(scale=0.5)]}})
    assert travelled is not None
    assert travelled["warmup"]["shapes"][0]["lora"] == {"path": "/adapters/style", "scale": 0.5}
    assert read_config(travelled).warmup.adapters == [Lora(path="/adapters/style", scale=0.5)]


def test_a_shape_with_an_adapter_is_warmed_without_it_too_and_once() -> None:
    def warmed(*given: Any) -> list[str]:
        return [str(shape) for shape in read_config({"warmup": {"shapes": list(given)}}).warmup.warmed]

    assert warmed("64x64", "32x32") == ["64x64", "32x32"]
    assert warmed("32x32", adapted()) == ["32x32", "64x64 (lora=/adapters/style)", "64x64"]
    assert warmed(adapted(), "64x64") == ["64x64 (lora=/adapters/style)", "64x64"]
    both = warmed(adapted(), adapted(path="/adapters/other"))
    assert both == ["64x64 (lora=/adapters/style)", "64x64", "64x64 (lora=/adapters/other)"]
    # All else that it says is said without it, too.
    (_, plain) = read_config({"warmup": {"shapes": [FULL | adapted()]}}).warmup.warmed
    assert plain == Shape(**FULL)


@pytest.mark.parametrize(
    ("warmup", "message"),
    [
        ({"shapes": ["64x64", "10x"]}, "warmup.shapes[1] is '10x', which is no shape; expected WIDTHxHEIGHT"),
        ({"shapes": ["0x64"]}, "warmup.shapes[0] is '0x64', which is no shape"),
        ({"shapes": [5]}, "warmup.shapes[0] is 5, which is no shape"),
        ({"shapes": [{"width": 64}]}, "shapes[0] is {'width': 64}, which has no height; expected width and height, or"),
        ({"shapes": [{"height": 64}]}, "shapes[0] is {'height': 64}, which has no width"),
        ({"shapes": [{"images": 2}]}, "shapes[0] is {'images': 2}, which counts images and states no size"),
        ({"shapes": [{"width": 64, "height": "64"}]}, "warmup.shapes[0].height is '64' (str), expected a whole number"),
        ({"shapes": [{"widths": 64, "width": 1, "height": 1}]}, "shapes[0].widths'; did you mean 'width'?"),
        ({"shapes": [FULL | {"images": -1}]}, "warmup.shapes[0].images is -1, which is neither a count nor sizes"),
        ({"shapes": [FULL | {"images": ["64x64x9"]}]}, "images is ['64x64x9'], which is neither"),
        ({"shapes": [FULL | {"extra_args": []}]}, "warmup.shapes[0].extra_args is [] (list), expected a mapping"),
        ({"shapes": [FULL | {"lora": "/a"}]}, "warmup.shapes[0].lora is '/a' (str), expected a mapping"),
        ({"shapes": [FULL | {"lora": {}}]}, "warmup.shapes[0].lora.path is missing from {}"),
        (
            {"shapes": [adapted(lora_scale=1)]},
            "unknown key 'diffusion_compile_config.warmup.shapes[0].lora.lora_scale'",
        ),
        ({"shapes": [adapted(lora_scale=1)]}, "did you mean 'scale'? Known: path, name, scale, int_id"),
        ({"shapes": [adapted(scale=0)]}, "shapes[0].lora.scale is 0, which switches the adapter off; leave lora out"),
        ({"shapes": [adapted(int_id=0)]}, "warmup.shapes[0].lora.int_id is 0, expected at least 1"),
        (
            {"shapes": [adapted(int_id=7), adapted(int_id=7, path="/adapters/other")]},
            "two adapters with the lora.int_id 7, '/adapters/style' and '/adapters/other'",
        ),
        ({"budget_s": 0}, "warmup.budget_s is 0, expected more than 0"),
        ({"budget_s": float("inf")}, "warmup.budget_s is inf, expected a finite number"),
        ({"on_failure": "eager"}, "warmup.on_failure is 'eager' (str), expected 'serve' or 'fail'"),
        ({"report": "x"}, "did you mean 'report_path'? Known: shapes, budget_s, on_failure, report_path"),
        (["64x64"], "diffusion_compile_config.warmup is ['64x64'] (list), expected a mapping"),
    ],
)
def test_errors_name_what_was_found_and_what_was_expected(warmup: Any, message: str) -> None:
    with pytest.raises(SettingError) as error:
        read_config({"warmup": warmup})
    assert message in str(error.value)


@pytest.mark.parametrize(("count", "more"), [(0, False), (8, False), (100, True)])
def test_the_recompile_limit_leaves_room_for_every_declared_shape(count: int, more: bool) -> None:
    declared = {"warmup": {"shapes": [f"{64 + n}x64" for n in range(count)]}}
    settings = DiffusionCompileSettings(diffusion_compile_dynamic=False, diffusion_compile_config=read_config(declared))
    limit = effective_recompile_limit(settings)
    assert limit is not None and limit >= max(STATIC_RECOMPILE_LIMIT, 2 * count)
    assert (limit > STATIC_RECOMPILE_LIMIT) == more


def test_a_limit_of_the_users_own_stays() -> None:
    config = read_config({"recompile_limit": 3, "warmup": {"shapes": ["64x64"]}})
    settings = DiffusionCompileSettings(diffusion_compile_dynamic=False, diffusion_compile_config=config)
    assert effective_recompile_limit(settings) == 3


def test_adapters_of_different_layers_find_room_with_dynamic_shapes_too() -> None:
    def limit(count: int) -> int | None:
        declared = {"warmup": {"shapes": [adapted(path=f"/adapters/{number}") for number in range(count)]}}
        return effective_recompile_limit(DiffusionCompileSettings(diffusion_compile_config=read_config(declared)))

    assert limit(0) is None and limit(1) is None  # torch's own is enough
    many = limit(10)
    assert many is not None and many >= 2 * 10
