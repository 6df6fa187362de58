"""The folder that this process compiles into, and keeping what it compiled."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_omni_diffusion_compile.compile.cache.bundle import Manifest, artifacts
from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
from vllm_omni_diffusion_compile.compile.cache.store import Store
from vllm_omni_diffusion_compile.errors import BundleError, UnsafeDirectoryError

# Where torch looks for its own artifacts, and Triton for its below it. Source: torch/_inductor/runtime/cache_dir_utils.
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# The same, where it was this package that set it: processes that this one starts find both.
_OURS = "VLLM_OMNI_DIFFUSION_COMPILE_WORKING_DIR"

# How long after the last compilation artifacts are kept: a server that compiles often is not to write often.
_QUIET_S = 20.0
# A file that was changed this recently may be half of one.
_SETTLED_S = 10.0
_LOCK = "owner.lock"
# Begins the name of a folder that its process does not hold yet.
_NEW = "new-"
_STALE_S = 3600.0
# What a model's sources, objects and precompiled headers may take while they are being compiled. Where less is free the
# compiler fails for want of room, and the model would run eagerly for the sake of the cache.
ROOM_BYTES = 256 << 20

Warn = Callable[[str], None]


class Working:
    """The folder that torch compiles into, restored from the cache, and what it kept.

    Args:
        store: Where bundles are.
        key: Of what this process compiles.
        warn: Told, in a sentence, of everything that costs a compilation.

    Attributes:
        folder: For torch's artifacts; private to this process.
        restored: What the cache had; None if nothing that could be used.
    """

    def __init__(self, store: Store, key: CacheKey, warn: Warn) -> None:
        self._store, self.key, self._warn = store, key, warn
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._warned = False
        self._kept: set[str] = set()
        made, self._writes = _make(store, self._say_once)
        # The folder is held as long as this process lives; what nobody holds was left by one that was killed.
        self._holder = (made / _LOCK).open("w")
        fcntl.flock(self._holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._own = made.rename(made.with_name(made.name.removeprefix(_NEW)))
        atexit.register(self.close)
        self.folder = self._own / "inductor"
        self.restored = self._restore()

    def _restore(self) -> Manifest | None:
        self.folder.mkdir()
        try:
            manifest = self._store.restore(self.key, self.folder)
        except UnsafeDirectoryError as error:
            self._writes = False
            self._say_once(f"{error}. Nothing is read from it or kept in it; this start compiles everything.")
        except (BundleError, OSError) as error:
            self._say_once(f"{error}. It is not used, and this start compiles everything.")
        else:
            if manifest is not None:
                self._kept = set(manifest.files)
            return manifest
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        return None

    def use(self) -> None:
        """Have torch compile into the folder."""
        os.environ[VARIABLE] = os.environ[_OURS] = str(self.folder)

    def keep(self, *, settled: bool) -> Manifest | None:
        """Add what was compiled to the cache.

        Args:
            settled: Whether nothing is being compiled right now; else what is too new is left for the next time.

        Returns:
            What is in the cache now; None if nothing was new, or if it could not be written, which is said.
        """
        with self._lock:
            if not self._writes:
                return None
            files = dict(artifacts(self.folder, older_than=None if settled else time.time() - _SETTLED_S))
            if files.keys() <= self._kept:
                return None
            try:
                manifest = self._store.add(self.key, files)
            except (OSError, UnsafeDirectoryError) as error:
                self._say_once(f"{error}. What was compiled is not kept, and the next start compiles it again.")
                return None
            self._kept |= files.keys()
            return manifest

    def keep_soon(self) -> None:
        """Add what is being compiled to the cache once the compiler has been quiet for a while."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(_QUIET_S, self.keep, kwargs={"settled": False})
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Remove the folder; torch does not find anything in it after this."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            shutil.rmtree(self._own, ignore_errors=True)
            self._holder.close()

    def _say_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(what)


def belongs_to_user() -> str | None:
    """Return the directory that the user, not torch itself, has told torch to use.

    Torch writes its own choice into the same variable, as this package does.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    said = os.environ.get(VARIABLE)
    chosen = said is not None and said != os.environ.get(_OURS) and Path(said) != Path(default_cache_dir())
    return said if chosen else None


def _make(store: Store, warn: Warn) -> tuple[Path, bool]:
    """Make a private folder beside the bundles, or where temporary files are if that cannot be written or is full.

    Returns:
        The folder, and whether it is beside the bundles: what is compiled elsewhere is not kept.
    """
    try:
        store.prepare()
        beside = store.directory / "working"
        beside.mkdir(mode=0o700, exist_ok=True)
        _remove_left_behind(beside)
        _refuse_full(beside)
        return Path(tempfile.mkdtemp(prefix=_NEW, dir=beside)), True
    except (OSError, UnsafeDirectoryError) as error:
        warn(f"{error}. What is compiled is not kept beyond this process.")
        return Path(tempfile.mkdtemp(prefix=f"{_NEW}vllm-omni-diffusion-compile-")), False


def _refuse_full(beside: Path) -> None:
    """Refuse a disk that the compiler would fill, if there is a better one.

    Raises:
        OSError: There is too little room, and enough where temporary files are.
    """
    free = shutil.disk_usage(beside).free
    if free < ROOM_BYTES <= shutil.disk_usage(tempfile.gettempdir()).free:
        said = f"{free >> 20} MiB are free, and compiling may take {ROOM_BYTES >> 20} MiB"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {said}", str(beside))


def _remove_left_behind(beside: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in beside.iterdir():
        with contextlib.suppress(OSError):  # such as that its process has just renamed or removed it
            if folder.name.startswith(_NEW) and folder.stat().st_mtime > time.time() - _STALE_S:
                continue
            with (folder / _LOCK).open("r+") as holder:
                fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process lives
                shutil.rmtree(folder, ignore_errors=True)
