"""`vllm-omni-compile cache`: what compiled artifacts are kept, and shipping them to replicas."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni_diffusion_compile.commands.output import console
from vllm_omni_diffusion_compile.errors import BundleError, SettingError

if TYPE_CHECKING:
    from vllm_omni_diffusion_compile.compile.cache.store import Entry, Store

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
# What fsspec raises for a file or a URL: also for a protocol that it does not know, or whose package is missing.
_NOT_THERE = (OSError, ValueError, ImportError)


HELP = "list, export, import and prune compiled artifacts that are kept"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--cache-dir", metavar="DIR", type=Path,
        help="as in --diffusion-compile-config.cache_dir (default: diffusion_compile within vLLM's cache)",
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what is kept", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="as JSON, with every fact of each key")
    export = actions.add_parser("export", help="copy a bundle to where replicas take it from", allow_abbrev=False)
    export.add_argument("key", help="its digest, or as much of it as is unique; see list")
    export.add_argument("destination", help="a file, a folder, or a URL that fsspec knows (s3://bucket/name.tar)")
    importing = actions.add_parser("import", help="take a bundle that was exported", allow_abbrev=False)
    importing.add_argument("source", help="a file or a URL that fsspec knows")
    importing.add_argument(
        "--sha256", required=True, metavar="DIGEST",
        help="what export printed, brought here by a way that you trust: a bundle is code that the server will run",
    )  # fmt: skip
    prune = actions.add_parser("prune", help="remove what is no longer used", allow_abbrev=False)
    prune.add_argument("--older-than", metavar="AGE", type=_seconds, help="not used for so long: 12h, 30d")
    prune.add_argument("--max-size", metavar="SIZE", type=_bytes, help="the latest used up to so much stay: 2G")
    prune.add_argument("--all", action="store_true", help="everything")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(options: argparse.Namespace) -> int:
    """Run it."""
    from vllm_omni_diffusion_compile.compile.cache.store import Store, default_directory

    store = Store((options.cache_dir or default_directory()).expanduser())
    actions = {"list": _list, "export": _export, "import": _import, "prune": _prune}
    return actions[options.action](store, options)


def _list(store: Store, options: argparse.Namespace) -> int:
    entries = list(store.entries())
    if options.json:
        print(
            json.dumps({"directory": str(store.directory), "bundles": [_plain(entry) for entry in entries]}, indent=2)
        )
        return 0
    if not entries:
        print(f"nothing is kept in {store.directory}")
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(str(store.directory), style="table.title"), title_justify="left")
    for heading in ("key", "model", "settings", "device", "torch", "files", "MB", "used", "problem"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        facts = entry.manifest.key.facts if entry.manifest else {}
        cells = (
            entry.digest, facts.get("model", ""), facts.get("settings", ""), facts.get("device", ""),
            facts.get("torch", "").partition(" ")[0], str(len(entry.manifest.files)) if entry.manifest else "",
            f"{entry.bytes / 1e6:.1f}", _ago(entry.used_at), entry.problem,
        )  # fmt: skip
        table.add_row(*map(Text, cells))
    console().print(table)
    return 0


def _plain(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "key": entry.digest,
        "path": str(entry.path),
        "bytes": entry.bytes,
        "used_at": entry.used_at,
        "made_at": manifest.made_at if manifest else None,
        "artifacts": len(manifest.files) if manifest else None,
        "facts": dict(manifest.key.facts) if manifest else {},
        "problem": entry.problem,
    }


def _export(store: Store, options: argparse.Namespace) -> int:
    import fsspec

    from vllm_omni_diffusion_compile.compile.cache.bundle import read_bundle, sha256_of

    found = [entry for entry in store.entries() if entry.digest.startswith(options.key)]
    if len(found) != 1:
        known = ", ".join(entry.digest for entry in (found or store.entries())) or "none"
        raise SettingError(
            f"key {options.key!r} names {len(found)} bundles of {store.directory}, expected one of: {known}"
        )
    entry = found[0]
    if entry.problem:
        raise BundleError(f"{entry.path}: {entry.problem}")
    with tempfile.TemporaryDirectory() as folder:
        # A copy, since a server may put another bundle in its place while this one is read.
        copy = Path(shutil.copy(entry.path, folder))
        with read_bundle(copy) as (_, files):
            artifacts = len(list(files))  # each is checked on the way
        digest = sha256_of(copy)
        destination = options.destination
        if "://" not in destination and Path(destination).is_dir():
            destination = str(Path(destination, entry.path.name))
        try:
            with copy.open("rb") as source, fsspec.open(destination, "wb") as target:
                shutil.copyfileobj(source, target)
        except _NOT_THERE as error:
            raise SettingError(f"destination is {destination!r}, which cannot be written ({_why(error)})") from None
    print(
        f"exported {entry.digest} ({artifacts} artifact(s), {entry.bytes / 1e6:.1f} MB) to {destination}",
        file=sys.stderr,
    )
    print(f"vllm-omni-compile cache import {destination} --sha256 {digest}")
    return 0


def _import(store: Store, options: argparse.Namespace) -> int:
    import fsspec

    from vllm_omni_diffusion_compile.compile.cache.bundle import read_bundle, sha256_of

    if not _SHA256.fullmatch(options.sha256):
        raise SettingError(f"--sha256 is {options.sha256!r}, expected the 64 hexadecimal digits that export printed")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "bundle.tar")
        try:
            with fsspec.open(options.source, "rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target)
        except _NOT_THERE as error:
            raise SettingError(f"source is {options.source!r}, which cannot be read ({_why(error)})") from None
        # Before anything of it is read.
        digest = sha256_of(copy)
        if digest != options.sha256.lower():
            raise BundleError(
                f"{options.source}: its SHA-256 digest is {digest}, and --sha256 says {options.sha256.lower()}; "
                "nothing of it was used: export it again, or find out who changed it"
            )
        with read_bundle(copy) as (manifest, files):
            added = store.add(manifest.key, dict(files))
    what = f"{len(manifest.files)} artifact(s) of {manifest.key.facts.get('model', '?')}, key {manifest.key.digest}"
    print(f"{what}: {'imported' if added else 'all there before'}")
    return 0


def _why(error: BaseException) -> str:
    """Say what went wrong; fsspec says of each failed connection that there is no such file, and keeps the cause."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def _prune(store: Store, options: argparse.Namespace) -> int:
    if not (options.all or options.older_than is not None or options.max_size is not None):
        raise SettingError("expected --older-than, --max-size or --all, to say what is to be removed")
    left = removed = 0
    for entry in sorted(store.entries(), key=lambda entry: entry.used_at, reverse=True):
        old = options.older_than is not None and time.time() - entry.used_at > options.older_than
        too_much = options.max_size is not None and left + entry.bytes > options.max_size
        if options.all or old or too_much or entry.problem:
            if not options.dry_run:
                entry.path.unlink(missing_ok=True)
                (store.directory / f"{entry.digest}.lock").unlink(missing_ok=True)
            print(f"{'would remove' if options.dry_run else 'removed'} {entry.path} ({entry.bytes / 1e6:.1f} MB)")
            removed += 1
        else:
            left += entry.bytes
    if not removed:
        print(f"nothing to remove in {store.directory}")
    return 0


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    unit = next((unit for unit in "wdhm" if seconds >= _TIMES[unit]), "s")
    return f"{seconds / _TIMES[unit]:.0f} {unit} ago"


def _seconds(text: str) -> float:
    return _scaled(text, _TIMES, "an age such as 12h or 30d")


def _bytes(text: str) -> float:
    return _scaled(text.removesuffix("B").removesuffix("b"), _UNITS, "a size such as 500M or 2G")


def _scaled(text: str, units: dict[str, int], expected: str) -> float:
    number, unit = text[:-1], text[-1:].lower()
    if unit not in units or not re.fullmatch(r"\d+(\.\d+)?", number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return float(number) * units[unit]
