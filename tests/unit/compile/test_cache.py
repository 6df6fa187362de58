"""The cache of compiled artifacts: what is kept comes back, and what is not as it was kept costs a warning only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from vllm_omni_diffusion_compile.compile.cache import store as store_module
from vllm_omni_diffusion_compile.compile.cache.bundle import read_bundle, write_bundle
from vllm_omni_diffusion_compile.compile.cache.key import CacheKey, machine_facts
from vllm_omni_diffusion_compile.compile.cache.store import Store, default_directory
from vllm_omni_diffusion_compile.compile.cache.working import VARIABLE, Working, belongs_to_user
from vllm_omni_diffusion_compile.errors import BundleError, UnsafeDirectoryError

KEY = CacheKey({"torch": "2.11", "model": "KleinPipeline"})
OTHER = CacheKey({"torch": "2.13", "model": "KleinPipeline"})
FILES = {"ab/kernel.so": b"\x7fELF" * 1000, "fxgraph/cd/graph": b"pickled", "triton/0/x.cubin": b""}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


class Warnings(list[str]):
    def __call__(self, what: str) -> None:
        self.append(what)


def start(store: Store, key: CacheKey = KEY) -> tuple[Working, Warnings]:
    """What a server does before it loads its weights."""
    warnings = Warnings()
    return Working(store, key, warnings), warnings


def compile_into(working: Working, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = working.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def found_in(working: Working) -> dict[str, bytes]:
    return {
        path.relative_to(working.folder).as_posix(): path.read_bytes()
        for path in working.folder.rglob("*")
        if path.is_file()
    }


def keep(store: Store, files: Mapping[str, bytes], key: CacheKey = KEY) -> None:
    working, warnings = start(store, key)
    compile_into(working, files)
    assert working.keep(settled=True) is not None
    working.close()
    assert not warnings


def test_the_next_start_begins_with_what_was_kept(store: Store) -> None:
    keep(store, FILES)
    working, warnings = start(store)
    assert found_in(working) == FILES
    assert working.restored is not None
    assert not warnings
    assert working.keep(settled=True) is None  # nothing new, nothing written


def test_another_key_finds_nothing(store: Store) -> None:
    keep(store, FILES)
    working, warnings = start(store, OTHER)
    assert working.restored is None
    assert not found_in(working)
    assert not warnings


def test_two_servers_at_once_keep_what_both_compiled(store: Store) -> None:
    first, _ = start(store)
    second, _ = start(store)
    assert first.folder != second.folder
    compile_into(first, {"a": b"1", "both": b"same"})
    compile_into(second, {"b": b"2", "both": b"same"})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda working: working.keep(settled=True), (first, second)))
    third, warnings = start(store)
    assert found_in(third) == {"a": b"1", "b": b"2", "both": b"same"}
    assert not warnings


def test_locks_and_unfinished_files_are_not_kept(store: Store) -> None:
    working, _ = start(store)
    compile_into(working, {"locks/a.lock": b"", "x.so.lock": b"", "y.tmp": b"half", "z": b"whole"})
    old = working.folder / "settled"
    old.write_bytes(b"settled")
    os.utime(old, (time.time() - 60, time.time() - 60))
    kept = working.keep(settled=False)  # something may be being compiled
    assert kept is not None
    assert set(kept.files) == {"settled"}
    kept = working.keep(settled=True)
    assert kept is not None
    assert set(kept.files) == {"settled", "z"}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    where = content.index(b"\x7fELF")
    content[where + 5] ^= 1
    path.write_bytes(bytes(content))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"something else altogether" * 100)


def _of_another_key(path: Path) -> None:
    path.unlink()
    write_bundle(path, OTHER, {"evil.so": b"\x7fELF"})


def _with_one_more(path: Path) -> None:
    with tarfile.open(path, "a") as tar:
        tar.add(__file__, arcname="../../evil.py")


def _with_another_key_inside(path: Path) -> None:
    with read_bundle(path) as (manifest, files):
        content = dict(files)
    path.unlink()
    write_bundle(path, CacheKey({**manifest.key.facts, "torch": "1"}), content)


@pytest.mark.parametrize(
    "damage", [_cut, _flip, _empty, _foreign, _of_another_key, _with_one_more, _with_another_key_inside]
)
def test_a_damaged_or_swapped_bundle_costs_one_warning_and_is_replaced(store: Store, damage: object) -> None:
    keep(store, FILES)
    damage(store.path(KEY.digest))  # type: ignore[operator]
    working, warnings = start(store)
    assert working.restored is None
    assert not found_in(working)
    assert not (store.directory.parent / "evil.py").exists()
    (warning,) = warnings
    assert str(store.path(KEY.digest)) in warning
    assert "this start compiles everything" in warning
    compile_into(working, {"new": b"new"})
    assert working.keep(settled=True) is not None
    again, warnings = start(store)
    assert found_in(again) == {"new": b"new"}
    assert not warnings


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_is_neither_read_nor_written(store: Store, mode: int) -> None:
    keep(store, FILES)
    store.directory.chmod(mode)
    working, (warning,) = start(store)
    assert working.restored is None
    assert not found_in(working)
    assert f"chmod go-w {store.directory}" in warning
    compile_into(working, {"new": b"new"})
    assert working.keep(settled=True) is None
    store.directory.chmod(0o700)
    with read_bundle(store.path(KEY.digest)) as (manifest, _):
        assert set(manifest.files) == set(FILES)


def test_a_bundle_that_others_can_write_is_not_read(store: Store) -> None:
    keep(store, FILES)
    store.path(KEY.digest).chmod(0o666)
    working, (warning,) = start(store)
    assert working.restored is None
    assert f"chmod go-w {store.path(KEY.digest)}" in warning


def test_a_directory_whose_parent_others_can_write_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError, match="above the cache directory"):
        Store(parent / "cache").prepare()
    parent.chmod(0o1777)  # as /tmp: nobody can put another folder in its place
    Store(parent / "cache").prepare()


def test_somebody_elses_directory_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(store, FILES)
    owner = store.directory.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:  # root's own files are everybody's to trust
        os.chown(store.path(KEY.digest), 4711, -1)
    working, warnings = start(store)
    assert working.restored is None
    assert "belongs to user" in warnings[0]


def test_what_is_written_is_its_owners_alone(store: Store) -> None:
    keep(store, FILES)
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert store.path(KEY.digest).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_costs_one_warning(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    keep(store, FILES)
    before = store.path(KEY.digest).read_bytes()
    working, warnings = start(store)
    compile_into(working, {"new": b"new"})

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store_module, "write_bundle", fail)
    assert working.keep(settled=True) is None
    compile_into(working, {"newer": b"newer"})
    assert working.keep(settled=True) is None
    (warning,) = warnings
    assert os.strerror(number) in warning
    assert "the next start compiles it again" in warning
    assert store.path(KEY.digest).read_bytes() == before
    assert not list(store.directory.glob(".*.tmp"))


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    working, (warning,) = start(Store(tmp_path / "file" / "cache"))
    assert "not kept beyond this process" in warning
    assert working.folder.is_dir()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_disk_without_room_for_the_compiler_is_not_compiled_on_if_there_is_a_better_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    keep(store, FILES)
    real = shutil.disk_usage(store.directory)

    def usage(path: object) -> object:
        full = not elsewhere or Path(str(path)).is_relative_to(store.directory)
        return real._replace(free=3 << 20 if full else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    working, warnings = start(store)
    assert working.restored is not None  # reading takes no room
    assert working.folder.is_relative_to(store.directory) != elsewhere
    compile_into(working, {"new": b"new"})
    kept = working.keep(settled=True)
    if elsewhere:
        (warning,) = warnings
        assert "No space left on device: 3 MiB are free" in warning and "not kept beyond this process" in warning
        assert kept is None
    else:
        assert not warnings and kept is not None


KILLED = """
import os, signal, sys
from pathlib import Path
from vllm_omni_diffusion_compile.compile.cache import store as store_module
from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
from vllm_omni_diffusion_compile.compile.cache.store import Store
from vllm_omni_diffusion_compile.compile.cache.working import VARIABLE, Working, belongs_to_user

def killed(path, key, files):
    path.write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)

working = Working(Store(Path(sys.argv[1])), CacheKey({"torch": "2.11", "model": "KleinPipeline"}), print)
(working.folder / "new").write_bytes(b"new")
store_module.write_bundle = killed
working.keep(settled=True)
"""


def test_a_writer_that_is_killed_leaves_the_old_bundle_and_is_cleared_up_after(store: Store) -> None:
    keep(store, FILES)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(store.directory)], check=False, timeout=120)
    assert ended.returncode == -9
    assert len(list((store.directory / "working").iterdir())) == 1
    (unfinished,) = store.directory.glob(".*.tmp")
    os.utime(unfinished, (0, 0))
    working, warnings = start(store)
    assert found_in(working) == FILES
    assert not warnings
    assert list((store.directory / "working").iterdir()) == [working.folder.parent]
    compile_into(working, {"new": b"new"})
    assert working.keep(settled=True) is not None
    assert not unfinished.exists()


def test_a_folder_in_use_is_not_cleared_up(store: Store) -> None:
    first, _ = start(store)
    compile_into(first, FILES)
    start(store)
    assert found_in(first) == FILES
    first.close()
    assert not first.folder.exists()


def test_the_directory_is_within_the_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert default_directory() == tmp_path / "root" / "diffusion_compile"
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "vllm" / "diffusion_compile"


def test_only_what_the_user_chose_counts_as_the_users(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (VARIABLE, "VLLM_OMNI_DIFFUSION_COMPILE_WORKING_DIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    assert belongs_to_user() is None
    cache_dir()  # writes torch's own choice into the variable
    assert belongs_to_user() is None
    working, _ = start(store)
    working.use()
    assert cache_dir() == str(working.folder)
    assert belongs_to_user() is None
    monkeypatch.setenv(VARIABLE, str(store.directory / "mine"))
    assert belongs_to_user() == str(store.directory / "mine")


def test_a_key_changes_with_every_fact_and_with_nothing_else() -> None:
    facts = machine_facts()
    assert all(facts.values())
    assert CacheKey(facts).digest == CacheKey(dict(reversed(facts.items()))).digest
    digests = {CacheKey(facts | {name: "other"}).digest for name in facts}
    assert len(digests) == len(facts)


def cache(store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_omni_diffusion_compile", "cache", "--cache-dir", str(store.directory)]
    return subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, timeout=120)


def test_the_command_line_ships_a_bundle_to_a_replica(store: Store, tmp_path: Path) -> None:
    keep(store, FILES)
    (bundle,) = json.loads(cache(store, "list", "--json").stdout)["bundles"]
    assert bundle["key"] == KEY.digest
    assert bundle["artifacts"] == len(FILES)
    assert bundle["facts"] == dict(KEY.facts)
    exported = cache(store, "export", KEY.digest[:6], f"file://{tmp_path}/shipped.tar")
    assert exported.returncode == 0, exported.stderr
    digest = hashlib.sha256((tmp_path / "shipped.tar").read_bytes()).hexdigest()
    assert exported.stdout == f"vllm-omni-compile cache import file://{tmp_path}/shipped.tar --sha256 {digest}\n"
    replica = Store(tmp_path / "replica")
    wrong = cache(replica, "import", f"{tmp_path}/shipped.tar", "--sha256", "0" * 64)
    assert wrong.returncode == 2
    assert f"its SHA-256 digest is {digest}" in wrong.stderr
    assert not replica.directory.exists()
    imported = cache(replica, "import", f"file://{tmp_path}/shipped.tar", "--sha256", digest)
    assert imported.returncode == 0, imported.stderr
    working, warnings = start(replica)
    assert found_in(working) == FILES
    assert not warnings


@pytest.mark.parametrize(
    ("action", "where", "said"),
    [
        ("export", "nobody://x/y.tar", "which cannot be written (ValueError: Protocol not known: nobody)"),
        ("export", "TMP/a file/y.tar", "which cannot be written ("),
        ("import", "nobody://x/y.tar", "which cannot be read (ValueError: Protocol not known: nobody)"),
        ("import", "TMP", "which cannot be read (IsADirectoryError: "),
        ("import", "TMP/nowhere.tar", "which cannot be read (FileNotFoundError: "),
        ("import", "http://127.0.0.1:9/y.tar", "which cannot be read (ClientConnectorError: Cannot connect to host"),
    ],
)
def test_a_place_that_cannot_be_reached_is_one_line(
    store: Store, tmp_path: Path, action: str, where: str, said: str
) -> None:
    keep(store, FILES)
    (tmp_path / "a file").touch()
    where = where.replace("TMP", str(tmp_path))
    arguments = ["export", KEY.digest, where] if action == "export" else ["import", where, "--sha256", "0" * 64]
    done = cache(store, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_renamed_while_it_is_looked_at_costs_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(store)[0].close()
    beside = store.directory / "working"
    (beside / "new-other").mkdir()
    stat = Path.stat

    def renamed(path: Path, **options: bool) -> os.stat_result:
        if path.name == "new-other":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", renamed)
    working, warnings = start(store)
    assert working.folder.is_relative_to(beside)
    assert not warnings


def test_prune_removes_what_was_not_used_for_long(store: Store) -> None:
    keep(store, FILES)
    keep(store, FILES, OTHER)
    week = time.time() - 7 * 86400
    os.utime(store.path(KEY.digest), (week, week))
    assert "would remove" in cache(store, "prune", "--older-than", "3d", "--dry-run").stdout
    assert store.path(KEY.digest).exists()
    assert cache(store, "prune", "--older-than", "3d").returncode == 0
    assert not store.path(KEY.digest).exists()
    assert store.path(OTHER.digest).exists()
    assert "nothing to remove" in cache(store, "prune", "--older-than", "3d").stdout
    assert cache(store, "prune").returncode == 2
    assert cache(store, "prune", "--max-size", "1k").returncode == 0
    assert not store.path(OTHER.digest).exists()


def test_a_bundle_is_checked_as_it_is_read(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a.tar", KEY, FILES)
    with read_bundle(tmp_path / "a.tar") as (manifest, files):
        assert manifest.key == KEY
        assert dict(files) == FILES
    with pytest.raises(BundleError, match="no bundle"), read_bundle(Path(__file__)):
        pass
