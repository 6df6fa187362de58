"""Every command that the README and docs/ show is run, or read by the program that it is for.

| command | what is done with it |
|---|---|
| `vllm-omni-compile ...` | run as written, beside the files that its page names; a console block shows what it prints |
| `vllm serve ...` | read by the release's own parser, and resolved by it to the settings of a stage |
| `curl ...` | its route and its fields are looked up in the release's own server |
| `python -m tools...` | the module is started and reads its arguments |
| `python -m pytest FILE` | the file is there |
| `make ...` | `make --dry-run`, so the target is there |
| `git ...` | run, in a repository made for it |
| what is in EXCEPTIONS | nothing here; each says what shows it instead |

The servers of the quickstart are started for real by tests/serve; STARTED says where.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import PAGES, ROOT, Command, commands
from tests.host import CONFIG, THREE, generic, resolve, serve_parser
from vllm_omni_diffusion_compile.commands.main import COMMANDS, main
from vllm_omni_diffusion_compile.compile.cache.key import CacheKey
from vllm_omni_diffusion_compile.compile.cache.store import Store
from vllm_omni_diffusion_compile.settings import Shape
from vllm_omni_diffusion_compile.settings.reading import read_config
from vllm_omni_diffusion_compile.warmup.declared import Outcome
from vllm_omni_diffusion_compile.warmup.report import ROUTE, document

ALL = [command for page in PAGES for command in commands(page)]
# Commands that are neither run nor read here, by how they begin, and what shows them instead.
EXCEPTIONS = {
    "pip install .": "tests/packaging installs what it would build, into an environment that has the host alone",
    "uv build": "tests/packaging runs it as docs/releasing.md has it",
}
# Commands of ours that take a server or many minutes: their own parser reads them, and their own tests run them.
LONG = ("bench", "qualify")
# Commands whose status says what they found; what argparse refuses ends differently.
STATUSES = {"doctor": (0, 1, 2)}


def _begins(command: Command, *words: str) -> bool:
    return command.words[: len(words)] == words


SERVE = [command for command in ALL if _begins(command, "vllm", "serve")]
PYTEST = [command for command in ALL if _begins(command, "python", "-m", "pytest")]
TOOLS = [command for command in ALL if _begins(command, "python", "-m") and command not in PYTEST]
OURS = [command for command in ALL if _begins(command, "vllm-omni-compile")]
CURL = [command for command in ALL if _begins(command, "curl")]
MAKE = [command for command in ALL if _begins(command, "make")]
GIT = [command for command in ALL if _begins(command, "git")]


def test_no_command_is_left_out() -> None:
    covered = {*SERVE, *TOOLS, *PYTEST, *OURS, *CURL, *MAKE, *GIT}
    excepted = tuple(EXCEPTIONS)
    left = [str(command) for command in ALL if command not in covered and not command.text.startswith(excepted)]
    assert not left, f"commands that no rule covers; write a rule, or an exception that says what shows them: {left}"
    unused = [text for text in EXCEPTIONS if not any(command.text.startswith(text) for command in ALL)]
    assert not unused, f"exceptions for commands that no page shows any more: {unused}"


# --- vllm serve -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    with serve_parser() as built:
        yield built


@pytest.mark.parametrize("command", SERVE, ids=str)
def test_a_serve_command_is_read_and_resolved(
    command: Command, parser: Any, tmp_path: Path, release: tuple[int, int]
) -> None:
    _, _, model, *options = command.words
    assert not model.startswith("-"), "expected the model right behind `vllm serve`"
    args = parser.parse_args(["serve", generic(tmp_path / "model"), *options])
    given = args.get_explicit_kwargs_dict()
    model = given.pop("model", None) or args.model_tag
    (stage,) = resolve(model, release, **{name: value for name, value in given.items() if name not in _OF_SERVER})
    said = {name: value for name, value in given.items() if name in (*THREE, CONFIG)}
    overridden = (given.get("stage_overrides") or {}).get("0", {})
    for name, value in (said | overridden).items():
        if name == CONFIG:
            assert read_config(stage[name], "resolved") == read_config(value, "typed")
        else:
            assert stage[name] == value
    assert set(command.environment) <= {"VLLM_PLUGINS", "VLLM_CACHE_ROOT"}
    if "VLLM_PLUGINS" in command.environment:
        known = {"diffusion_compile", "diffusion_cpu", "vllm_omni_register_models"}
        assert set(command.environment["VLLM_PLUGINS"].split(",")) <= known


# What the server keeps for itself.
_OF_SERVER = {"omni", "model_tag", "subparser", "command", "dispatch_function"}


# Of the quickstart's servers, those that are started for real, and why the others are read only.
STARTED = {
    "vllm serve MODEL --omni": "tests/serve/test_compile.py, which also sends the quickstart's requests",
    "VLLM_PLUGINS=diffusion_cpu,vllm_omni_register_models vllm serve MODEL --omni": "tests/serve/test_cpu_platform.py",
}
READ_ONLY = {
    "VLLM_PLUGINS=vllm_omni_register_models vllm serve MODEL --omni": "it needs an accelerator",
    "vllm serve /tmp/klein --omni": "the first of STARTED is of the same checkpoint",
    "vllm serve MODEL --omni --diffusion-compile-config.warmup.shapes": "test_metrics.py of tests/serve has small ones",
}


def test_the_servers_of_the_quickstart_are_started_or_it_says_why_not() -> None:
    shown = [command for command in SERVE if command.page == "quickstart.md" and not command.inline]
    for command in shown:
        assert command.text in STARTED or command.text.startswith(tuple(READ_ONLY)), command
    for text in STARTED:
        assert text in [command.text for command in shown]


# --- vllm-omni-compile ------------------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """A server that has a report."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == ROUTE else 404)
        self.end_headers()
        self.wfile.write(json.dumps(REPORT).encode())

    def log_message(self, *_: Any) -> None:
        pass


COLD = Outcome(shape=Shape(width=64, height=64), state="failed", reason="nothing ran")
REPORT = document([COLD], budget_s=None, spent_s=1.0, about={})
KEY = CacheKey({"model": "Flux2KleinPipeline"})
TRACE = (
    {"width": 1344, "height": 768, "seconds": 7, "prompt_rows": 300},
    {"width": 640, "height": 352, "frames": 107},
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


class Place:
    """A folder with what a page's commands find there, and what stands for what a reader fills in."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        self.replace = {
            "http://localhost:8000": server,
            "/var/log/vllm/": f"{folder}/",
            "/mnt/shared/": f"{folder}/",
            "607d": KEY.digest[:4],
        }
        (folder / "warmup.json").write_text(json.dumps(REPORT))
        (folder / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in TRACE))
        (folder / "deploy.yaml").write_text("stages:\n  - stage_id: 0\n    diffusion_compile_vae: false\n")
        (folder / "requests.csv").write_text("width,height,seconds,prompt_rows\n1344,768,7,300\n640,352,4.5,120\n")
        Store(folder / "caches" / "diffusion_compile").add(KEY, {"ab/kernel.so": b"code"})

    def filled_in(self, word: str) -> str:
        for shown, real in self.replace.items():
            word = word.replace(shown, real)
        return word

    def remember(self, output: str) -> None:
        """Keep the digest that export prints, for the import that the page shows after it."""
        if (digest := re.search(r"--sha256\s+([0-9a-f]{64})", output)) is not None:
            self.replace["1c3e..."] = digest[1]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, server: str) -> Callable[[str], Place]:
    made: dict[str, Place] = {}

    def place(page: str) -> Place:
        if page not in made:
            made[page] = Place(tmp_path_factory.mktemp(page), server)
        return made[page]

    return place


@pytest.mark.parametrize("command", OURS, ids=str)
def test_our_own_command_runs_as_written(
    command: Command,
    places: Callable[[str], Place],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = places(command.page)
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(place.folder / "caches"))
    monkeypatch.setenv("COLUMNS", "130")
    name, *words = map(place.filled_in, command.words[1:])
    if command.inline and not words and name in COMMANDS:
        # The text names the command; what it can do is in its help.
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        return
    if name in LONG:
        built = argparse.ArgumentParser()
        COMMANDS[name].add_arguments(built)
        built.parse_args(words)
        return
    assert main([name, *words]) in STATUSES.get(name, (0,)), capsys.readouterr().err
    printed = capsys.readouterr().out
    place.remember(printed)
    if command.output is not None:
        assert _trimmed(printed) == _trimmed(command.output)


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


# --- curl -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routes(parser: Any) -> list[Any]:
    """The routes of the release's own server, put together as the release does it."""
    from vllm_omni.entrypoints.openai import api_server

    app = api_server.build_openai_app(parser.parse_args(["serve", "MODEL", "--omni"]), ("generate",))
    app.include_router(api_server.router)
    return list(app.routes)


@pytest.mark.parametrize("command", CURL, ids=str)
def test_a_request_is_one_that_the_server_takes(command: Command, routes: list[Any]) -> None:
    from fastapi.dependencies.utils import get_flat_dependant
    from starlette.routing import Match

    reader = argparse.ArgumentParser(allow_abbrev=False)
    reader.add_argument("url")
    reader.add_argument("-sS", action="store_true")
    reader.add_argument("-o")
    reader.add_argument("-H", action="append", default=[])
    reader.add_argument("-d")
    reader.add_argument("-F", action="append", default=[])
    request = reader.parse_args(command.words[1:])
    address = urlsplit(request.url if "://" in request.url else f"http://{request.url}")
    assert address.hostname, "curl takes no address without a host"
    method = "POST" if request.d or request.F else "GET"
    scope = {"type": "http", "method": method, "path": address.path, "headers": [], "root_path": ""}
    found = [route for route in routes if route.matches(scope)[0] == Match.FULL]
    assert found, f"the server has no {method} {address.path}"
    if method == "GET":
        return
    route: Any = found[0]
    fields = get_flat_dependant(route.dependant, skip_repeats=True).body_params  # codespell:ignore dependant
    if request.d:
        assert "content-type: application/json" in map(str.lower, request.H)
        (field,) = fields
        body = json.loads(request.d)
        model: Any = field.field_info.annotation
        assert set(body) <= set(model.model_fields), "a field that the endpoint does not have"
        model(**body)
    else:
        form = dict(text.split("=", 1) for text in request.F)
        assert set(form) <= {field.alias for field in fields}, "a field that the endpoint does not have"
        json.loads(form.get("extra_params", "{}"))


# --- python -m, make, git -----------------------------------------------------------------------------------------


class _Read(Exception):
    pass


@pytest.mark.parametrize("command", TOOLS, ids=str)
def test_a_tool_reads_its_arguments(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, _, module, *words = command.words

    def only(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_only(self: argparse.ArgumentParser, *arguments: Any, **more: Any) -> Any:
            read(self, *arguments, **more)
            raise _Read

        return read_only

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, only(getattr(argparse.ArgumentParser, name)))
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another test may have imported it
    monkeypatch.chdir(tmp_path)  # in case it does not stop there
    with pytest.raises(_Read):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


@pytest.mark.parametrize("command", PYTEST, ids=str)
def test_a_test_file_is_there(command: Command) -> None:
    files = [word for word in command.words[3:] if not word.startswith("-")]
    assert files and all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize("command", MAKE, ids=str)
def test_a_target_of_make_is_there(command: Command) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with one commit on main, and nobody's settings."""
    folder = tmp_path_factory.mktemp("git")
    for words in (
        ("init", "--quiet", "--bare", "origin"),
        ("clone", "--quiet", "origin", "clone"),
        ("-C", "clone", "checkout", "--quiet", "-b", "main"),
        ("-C", "clone", "config", "user.name", "Somebody"),
        ("-C", "clone", "config", "user.email", "somebody@example.org"),
        ("-C", "clone", "commit", "--quiet", "--allow-empty", "--message", "A commit"),
    ):
        subprocess.run(["git", *words], cwd=folder, env=os.environ | _NOBODY, capture_output=True, check=True)
    return folder / "clone"


_NOBODY = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


@pytest.mark.parametrize("command", GIT, ids=str)
def test_git_takes_it(command: Command, repository: Path) -> None:
    done = subprocess.run(
        command.words, cwd=repository, env=os.environ | _NOBODY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
