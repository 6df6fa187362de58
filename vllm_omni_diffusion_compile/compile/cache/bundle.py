"""A bundle: the artifacts of one key, as one file that says what is in it.

It is a tar file. Its first member, `manifest.json`, has the key and the SHA-256 digest of every other member.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
from vllm_omni_diffusion_compile.errors import BundleError

_FORMAT = 1
_MANIFEST = "manifest.json"
# Torch's file locks, which mean nothing to another process, and what it has not finished writing.
_LEFT_OUT_FOLDERS = frozenset({"locks"})
_LEFT_OUT_SUFFIXES = (".lock", ".tmp")
_READ = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle holds.

    Args:
        key: What its artifacts depend on.
        files: SHA-256 digest of each, by path.
        made_at: Seconds since the epoch.
    """

    key: CacheKey
    files: Mapping[str, str]
    made_at: float


def artifacts(folder: Path, *, older_than: float | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of every artifact in a working folder.

    Args:
        folder: Torch's cache directory.
        older_than: Leave out what was changed after this, in seconds since the epoch: it may still be being written.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT_FOLDERS)
        for name in sorted(names):
            path = Path(root, name)
            if name.endswith(_LEFT_OUT_SUFFIXES) or path.is_symlink():
                continue
            try:
                if older_than is not None and path.stat().st_mtime > older_than:
                    continue
                yield path.relative_to(folder).as_posix(), path.read_bytes()
            except FileNotFoundError:
                continue  # torch's temporary name for what it has renamed since


def write_bundle(path: Path, key: CacheKey, files: Mapping[str, bytes]) -> Manifest:
    """Write a bundle that only its owner can read, and return when it is on the disk.

    Raises:
        OSError: It cannot be written; what was written of it is still there.
    """
    manifest = Manifest(
        key=key, files={name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}, made_at=time.time()
    )
    head = {
        "format": _FORMAT, "digest": key.digest, "key": dict(key.facts), "files": manifest.files,
        "made_at": manifest.made_at,
    }  # fmt: skip
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as raw:
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, _MANIFEST, json.dumps(head).encode())
            for name in manifest.files:
                _add(tar, name, files[name])
        raw.flush()
        os.fsync(raw.fileno())
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read what a bundle says of itself; its artifacts are not looked at.

    Raises:
        BundleError: It is no bundle, or not a whole one.
    """
    with _open(path) as tar:
        return _manifest(path, tar)


@contextlib.contextmanager
def read_bundle(path: Path) -> Iterator[tuple[Manifest, Iterator[tuple[str, bytes]]]]:
    """Open a bundle: what it says of itself, and its artifacts, each checked against its digest as it is read.

    Both are of the same file, even if another one takes its place meanwhile.

    Raises:
        BundleError: As `read_manifest`; from the iterator where an artifact is not what the manifest says.
    """
    with _open(path) as tar:
        manifest = _manifest(path, tar)
        yield manifest, _checked(path, tar, manifest)


def _checked(path: Path, tar: tarfile.TarFile, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    left = dict(manifest.files)
    try:
        for member in tar:
            if member.name == _MANIFEST:
                continue
            expected = left.pop(member.name, None)
            if expected is None or not member.isfile() or not _is_below(member.name):
                raise BundleError(f"{path}: found {member.name!r}, which its manifest does not name")
            content = _content(path, tar, member)
            if hashlib.sha256(content).hexdigest() != expected:
                raise BundleError(f"{path}: {member.name} is not what its manifest says: changed or damaged")
            yield member.name, content
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}: cut short or damaged") from None
    if left:
        raise BundleError(f"{path}: {len(left)} artifact(s) of its manifest are missing: cut short")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 digest of a file, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ):
            digest.update(block)
    return digest.hexdigest()


def _open(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, mode="r:")
    except (tarfile.TarError, EOFError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}: no bundle, or cut short") from None


def _manifest(path: Path, tar: tarfile.TarFile) -> Manifest:
    try:
        member = tar.next()
        if member is None or member.name != _MANIFEST or not member.isfile():
            raise BundleError(f"{path}: does not begin with {_MANIFEST}: no bundle of this package")
        head = json.loads(_content(path, tar, member))
        if head["format"] != _FORMAT:
            raise BundleError(f"{path}: has format {head['format']!r}, expected {_FORMAT}: of another release of ours")
        key = CacheKey({str(name): str(value) for name, value in head["key"].items()})
        if key.digest != head["digest"]:
            raise BundleError(f"{path}: its key is not the one that its digest was made of: changed")
        files = {str(name): str(digest) for name, digest in head["files"].items()}
        return Manifest(key=key, files=files, made_at=float(head["made_at"]))
    except (tarfile.TarError, EOFError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}: no bundle, or damaged") from None


def _content(path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    content = file.read() if file is not None else b""
    if len(content) != member.size:
        raise BundleError(f"{path}: {member.name} is cut short")
    return content


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o600
    tar.addfile(member, io.BytesIO(content))
