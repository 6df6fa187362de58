"""Cache directories that cannot be kept, and those that others could put code into."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_omni_diffusion_compile.doctor import Finding
from vllm_omni_diffusion_compile.doctor.cache import check_cache

_NOBODY = 65534


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "VLLM_DISABLE_COMPILE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def unprivileged(owned: Path) -> Iterator[None]:
    """Run as a user for whom permission bits count, and who owns a directory."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(owned, _NOBODY, _NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def directory(cache_dir: Path | None = None) -> Finding:
    return next(
        finding
        for finding in check_cache(None if cache_dir is None else str(cache_dir))
        if finding.name == "cache directory"
    )


def test_a_directory_of_ones_own_is_in_order_and_left_as_it_is(folder: Path) -> None:
    own = folder / "cache"
    own.mkdir(mode=0o700)
    assert directory(own).state == "ok"
    assert list(own.iterdir()) == []


def test_a_directory_that_is_not_there_is_not_made(folder: Path) -> None:
    finding = directory(folder / "deep" / "cache")
    assert finding.state == "ok"
    assert "the first start makes it" in finding.found
    assert list(folder.iterdir()) == []


def test_a_read_only_directory_is_named(folder: Path) -> None:
    own = folder / "cache"
    own.mkdir(mode=0o500)
    with unprivileged(own):
        finding = directory(own)
    assert finding.state == "limit"
    assert f"{own} (from cache_dir) cannot be written: Permission denied" in finding.found
    assert "make it writable" in finding.remedy and "cache_dir" in finding.remedy


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_others_can_write_is_named(folder: Path, mode: int) -> None:
    own = folder / "cache"
    own.mkdir()
    own.chmod(mode)
    finding = directory(own)
    assert finding.state == "limit"
    assert "can be written by others" in finding.found and f"chmod go-w {own}" in finding.found
    assert "each start compiles everything" in finding.remedy


def test_so_is_one_below_a_directory_that_everybody_can_write(folder: Path) -> None:
    folder.chmod(0o777)
    finding = directory(folder / "not" / "there")
    assert finding.state == "limit"
    assert f"{folder}, above the cache directory" in finding.found


@pytest.mark.parametrize(
    ("variable", "below"), [("VLLM_CACHE_ROOT", "diffusion_compile"), ("XDG_CACHE_HOME", "vllm/diffusion_compile")]
)
def test_what_chose_the_directory_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    monkeypatch.setenv(variable, str(folder))
    assert directory().found.startswith(f"{folder / below} (from {variable})")


def test_a_cache_that_is_off_is_said_to_be_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (off,) = check_cache(False)
    assert off.found == "off, since cache_dir is false"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert "torch's own" in directory().found
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    assert "off, since VLLM_DISABLE_COMPILE_CACHE is set" in directory().found


def test_a_damaged_bundle_is_named(folder: Path) -> None:
    own = folder / "cache"
    own.mkdir(mode=0o700)
    (own / "0123456789abcdef.tar").write_bytes(b"half of it")
    _, bundle, kept = check_cache(str(own))
    assert (bundle.name, bundle.state) == ("bundle 0123456789abcdef", "limit")
    assert "cut short" in bundle.found and "0123456789abcdef.tar" in bundle.remedy
    assert kept.found.startswith("0 bundle(s)")


def test_a_disk_without_room_for_the_compiler_is_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=3 << 20))
    finding = directory(folder / "cache")
    assert finding.state == "limit" and "3 MiB are free" in finding.found and "make room" in finding.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=1 << 40))
    assert directory(folder / "cache").state == "ok"
