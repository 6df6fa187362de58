"""The cache directory: which bundles are there, who may have written them, and adding one."""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vllm_omni_diffusion_compile.compile.cache.bundle import Manifest, read_bundle, read_manifest, write_bundle
from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
from vllm_omni_diffusion_compile.errors import BundleError, UnsafeDirectoryError

_SUFFIX = ".tar"
# Another server that writes the same bundle takes seconds.
_LOCK_TIMEOUT_S = 30.0
# What a writer that was killed has left behind.
_STALE_S = 3600.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_directory() -> Path:
    """Return where the cache is unless the user says otherwise: within vLLM's own.

    Source: `VLLM_CACHE_ROOT` in `vllm.envs`, which takes seconds to import.
    """
    cache_home = os.environ.get("XDG_CACHE_HOME", str(Path("~/.cache").expanduser()))
    root = os.environ.get("VLLM_CACHE_ROOT", str(Path(cache_home, "vllm")))
    return Path(root).expanduser() / "diffusion_compile"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A bundle in the cache directory.

    Args:
        path: Where it is.
        bytes: Its size.
        used_at: When a server last began with it or added to it, in seconds since the epoch.
        manifest: What it says of itself; None if it cannot be read.
        problem: Why not, or why it is not used; else empty.
    """

    path: Path
    bytes: int
    used_at: float
    manifest: Manifest | None
    problem: str = ""

    @property
    def digest(self) -> str:
        """The key's digest, from its name."""
        return self.path.stem


class Store:
    """A cache directory.

    Args:
        directory: It need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def prepare(self) -> None:
        """Make the directory, for its owner alone, if it is not there.

        Raises:
            UnsafeDirectoryError: Others can write it or put another in its place, or it belongs to somebody else.
            OSError: It cannot be made.
        """
        if not self.directory.is_dir():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def check(self) -> None:
        """Refuse a directory that others can write: compiled artifacts are code.

        One that is not there yet is judged by those above it.

        Raises:
            UnsafeDirectoryError: See `prepare`.
        """
        own = self.directory.resolve()
        if own.exists():
            _refuse_foreign(own, "directory")
        for parent in own.parents:
            if not parent.exists():
                continue
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise UnsafeDirectoryError(
                    f"{parent}, above the cache directory {self.directory}, can be written by everybody "
                    f"({stat.filemode(mode)}); take that right away, or choose another cache_dir"
                )

    def path(self, digest: str) -> Path:
        """Return where the bundle of a key is, or would be."""
        return self.directory / f"{digest}{_SUFFIX}"

    def entries(self) -> Iterator[Entry]:
        """Yield every bundle, by name; one that is damaged has a problem."""
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            problem, manifest = "", None
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # pruned meanwhile
            try:
                manifest = read_manifest(path)
                _refuse_foreign(path, "file")
                if manifest.key.digest != path.stem:
                    problem = f"it holds artifacts of the key {manifest.key.digest}"
            except (BundleError, OSError) as error:
                problem = str(error)
            yield Entry(path=path, bytes=status.st_size, used_at=status.st_mtime, manifest=manifest, problem=problem)

    def restore(self, key: CacheKey, folder: Path) -> Manifest | None:
        """Put the artifacts of a key into a working folder.

        Returns:
            What was there; None if there is no bundle of this key.

        Raises:
            BundleError, UnsafeDirectoryError: The bundle cannot be used; what was restored of it has to be thrown away.
            OSError: The disk.
        """
        path = self.path(key.digest)
        if not path.exists():
            return None
        self.check()
        _refuse_foreign(path, "file")
        with read_bundle(path) as (manifest, files):
            if manifest.key.digest != key.digest:
                raise BundleError(
                    f"{path}: holds artifacts of another key, {manifest.key.digest}: put there by mistake"
                )
            for name, content in files:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
            os.utime(path)
        return manifest

    def add(self, key: CacheKey, files: Mapping[str, bytes]) -> Manifest | None:
        """Add artifacts to the bundle of a key, beside those that are there already.

        Returns:
            What is there now; None if all of it was there before.

        Raises:
            UnsafeDirectoryError: See `prepare`.
            OSError: It cannot be written (TimeoutError: another process is writing it); what was there still is.
        """
        self.prepare()
        try:
            with FileLock(self.directory / f"{key.digest}.lock", timeout=_LOCK_TIMEOUT_S, mode=0o600):
                return self._add(key, files)
        except Timeout as error:
            raise TimeoutError(f"another process is writing {self.path(key.digest)}") from error

    def _add(self, key: CacheKey, files: Mapping[str, bytes]) -> Manifest | None:
        path = self.path(key.digest)
        there: dict[str, bytes] = {}
        try:
            with read_bundle(path) as (manifest, content):
                there = dict(content) if manifest.key.digest == key.digest else {}
        except (FileNotFoundError, BundleError):
            there = {}  # what is written now takes the place of what was damaged
        if there and files.keys() <= there.keys():
            return None
        self._remove_stale()
        unfinished = self.directory / f".{key.digest}-{uuid.uuid4().hex}.tmp"
        try:
            written = write_bundle(unfinished, key, {**there, **files})
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return written

    def _remove_stale(self) -> None:
        for path in self.directory.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _STALE_S:
                    path.unlink()


def _refuse_foreign(path: Path, what: str) -> None:
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeDirectoryError(
            f"the cache {what} {path} belongs to user {status.st_uid}, not to {os.geteuid()} who runs this; compiled "
            "artifacts are code: choose a cache_dir of your own"
        )
    if status.st_mode & _OTHERS_WRITE:
        raise UnsafeDirectoryError(
            f"the cache {what} {path} can be written by others ({stat.filemode(status.st_mode)}); compiled artifacts "
            f"are code: chmod go-w {path}, or choose another cache_dir"
        )
