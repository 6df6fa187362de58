"""The compile cache: where it is, whether it can be kept, and who else could put code into it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from vllm_omni_diffusion_compile.compile.cache.place import cache_directory
from vllm_omni_diffusion_compile.compile.cache.store import Store
from vllm_omni_diffusion_compile.compile.cache.working import ROOM_BYTES
from vllm_omni_diffusion_compile.doctor.finding import Finding
from vllm_omni_diffusion_compile.errors import UnsafeDirectoryError

_NAME = "cache directory"


def check_cache(cache_dir: str | Literal[False] | None = None) -> Iterator[Finding]:
    """Check the directory that a setting and the environment come to, as a server does before it uses it.

    Args:
        cache_dir: The key `cache_dir`.
    """
    directory, why = cache_directory(cache_dir)
    if directory is None:
        yield Finding.ok(_NAME, why)
        return
    why = "the default" if why == "default" else f"from {why}"
    store = Store(directory)
    try:
        store.check()
    except UnsafeDirectoryError as error:
        yield Finding.limit(
            _NAME,
            f"{error} ({why})",
            "do that: until then nothing is read from it or kept in it, and each start compiles everything",
        )
        return
    except OSError as error:
        yield _unusable(directory, why, error)
        return
    try:
        try_to_write(directory)
    except OSError as error:
        yield _unusable(directory, why, error)
    else:
        yield from _room(directory)
        safe = "only its owner can write it" if directory.is_dir() else "the first start makes it"
        yield Finding.ok(_NAME, f"{directory} ({why}); {safe}")
    yield from _bundles(store)


def try_to_write(directory: Path) -> None:
    """Write a file without a name into the directory, or into the nearest one above it that is there.

    Permission bits do not tell: a file system may be mounted read-only, and root may write everywhere else.

    Raises:
        OSError: It cannot be written.
    """
    with tempfile.TemporaryFile(dir=_nearest(directory)):
        pass


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.resolve().parents) if path.exists())


def _room(directory: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(_nearest(directory)).free
    if free < ROOM_BYTES:
        yield Finding.limit(
            _NAME,
            f"{free >> 20} MiB are free in {directory}, and compiling may take {ROOM_BYTES >> 20}",
            "make room, or choose another one (cache_dir, VLLM_CACHE_ROOT): the model runs eagerly where the compiler "
            "runs out of room",
        )


def _unusable(directory: Path, why: str, error: OSError) -> Finding:
    return Finding.limit(
        _NAME,
        f"{directory} ({why}) cannot be written: {error.strerror or error}",
        "make it writable for the user that serves, or choose another one (cache_dir, VLLM_CACHE_ROOT): what is "
        "compiled is not kept, and the next start compiles it again",
    )


def _bundles(store: Store) -> Iterator[Finding]:
    entries = []
    with contextlib.suppress(OSError):
        entries = list(store.entries())
    for entry in entries:
        if entry.problem:
            yield Finding.limit(
                f"bundle {entry.digest}", entry.problem, f"remove {entry.path}; the next start compiles what was in it"
            )
    sound = [entry for entry in entries if not entry.problem]
    size_mb = sum(entry.bytes for entry in sound) / 1e6
    yield Finding.ok("kept artifacts", f"{len(sound)} bundle(s), {size_mb:.1f} MB")
