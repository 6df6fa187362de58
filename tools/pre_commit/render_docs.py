"""Render `docs/grafts.md` from the ledgers, `docs/options.md` from the settings and `docs/evidence.md` from its rows.

`python -m tools.pre_commit.render_docs` writes them; with `--check` it writes nothing, and fails with a diff where one
is out of step.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools.pre_commit.ledgers import qualified_name, rows_of
from tools.pre_commit.render_evidence import files_of, render_evidence
from vllm_omni_diffusion_compile.settings import DiffusionCompileSettings
from vllm_omni_diffusion_compile.upstream.graft import FieldGraft, Graft

DOCS = Path(__file__).resolve().parents[2] / "docs"

_GENERATED = """\
<!-- Generated from {source}; do not edit it here.
     After a change there: python -m tools.pre_commit.render_docs -->
"""

_GRAFTS_INTRO = """\
# Grafts

A graft is one change to one name of vLLM-Omni, or of what it calls, made in memory once a process has imported the
module that the name lives in. No installed file is changed. Most grafts wrap a function and call straight through to it
when the feature they serve is off; the others add a name, a field or an entry of a table that is not there yet.

Before anything of a module is grafted, all its grafts are checked: the target exists, and it takes the parameters that
the graft was written for. If one does not hold, nothing of that module is touched, and the error names the target, what
was expected and what was found.

A graft steps aside where it is not needed: when the release already has the capability, when another graft's change has
already arrived there, and on releases other than those in the table. If another plugin wrapped the same target first,
ours calls theirs, and the log names it.

To switch all of them off, leave this package's two plugins, `diffusion_compile` and `diffusion_cpu`, out of
`VLLM_PLUGINS`. It lists, separated by commas, the plugins that vLLM and vLLM-Omni load; where it is not set, they load
every installed one. Name the plugins of others that you need:

```bash
VLLM_PLUGINS=vllm_omni_register_models vllm serve MODEL --omni                     # none of ours
VLLM_PLUGINS=diffusion_compile,vllm_omni_register_models vllm serve MODEL --omni   # without the CPU platform
```
"""

_GRAFT_TABLES = (
    ("Compile features", "vllm_omni_diffusion_compile.upstream.ledger", "GRAFTS"),
    ("CPU platform", "vllm_omni_diffusion_compile.platforms.cpu_grafts", "CPU_GRAFTS"),
)

_OPTIONS_INTRO = """\
# Options

Each option has one name on all surfaces: a flag of `vllm serve`, a key of a stage in the deploy YAML and in
`--stage-overrides`, and a keyword argument of `Omni` and `OmniDiffusionConfig`. The flag wins over the YAML, and the
YAML over the default; `--stage-overrides` wins over all of them, for its stage.
"""

_MAPPING_NOTES = """\
A dotted flag sets one key: `{flag}.{key} {value}`.
Flags that give the mapping more than once, dotted or as JSON, are taken together key by key; of a key that is given
twice the later value counts, and dotted flags count as the last.

Where the flag and the YAML both give the mapping, they are put together as vLLM-Omni does it with mappings of its own:
on 0.30.0 key by key, and the flag wins where both have a key; on 0.28.0 the flag's mapping takes the place of the
YAML's. What `--stage-overrides` gives takes the place of the flag's mapping on both releases.

An unknown key, a value of the wrong type and values that contradict each other are refused by name before anything is
loaded: on the command line as a usage error, in a deploy YAML with its path and stage.
"""


def render_grafts(tables: Iterable[tuple[str, Sequence[Graft]]]) -> str:
    """Return `docs/grafts.md`.

    Args:
        tables: Headings and the rows below them; one without rows is left out.
    """
    lines = [_GENERATED.format(source="the rows of upstream/ledger.py and platforms/cpu_grafts.py") + _GRAFTS_INTRO]
    for heading, rows in tables:
        if not rows:
            continue
        lines += [f"## {heading}", "", "| Target | Releases | Why | Upstream | Remove when |", "|---|---|---|---|---|"]
        for row in rows:
            releases = f"`{row.releases}`" if row.releases else "all"
            cells = (_target(row), releases, row.why, _upstream(row.upstream), row.remove_when)
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def render_options(settings: type[BaseModel]) -> str:
    """Return `docs/options.md` for a settings class."""
    lines = [_GENERATED.format(source="the fields of settings/") + _OPTIONS_INTRO]
    for name, field in settings.model_fields.items():
        extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        example = _example(field, extra)
        mapping = _mapping(field)
        lines += [
            f"## `{name}`",
            "",
            _sentence(field.description or ""),
            "",
            f"- Values: {'a mapping of the keys below' if mapping else _values(field.annotation)}",
            f"- Default: `{'{}' if mapping else _yaml(field.get_default(call_default_factory=True))}`",
            f"- Comes from: {extra.get('from', 'this package')}",
            "",
        ]
        if mapping:
            lines += [*_keys(mapping), ""]
        lines += ["| Surface | Example |", "|---|---|"]
        if "flag" in extra:
            command = f"vllm serve MODEL --omni {_flag_example(extra['flag'], example)}"
            lines.append(f"| Flag, `{_cell(extra['flag'])}` | `{command}` |")
            if mapping:
                dotted = " ".join(f"{extra['flag'].split()[0]}.{key} {_yaml(value)}" for key, value in example.items())
                lines.append(f"| The same, dotted | `vllm serve MODEL --omni {dotted}` |")
        lines += [
            f"| Key of a stage in the deploy YAML | `{name}: {_yaml(example)}` |",
            f"| Key of a stage in `--stage-overrides` | `'{json.dumps({'0': {name: example}})}'` |",
            f'| Keyword argument | `Omni(model="MODEL", {name}={_python(example)})` |',
            "",
        ]
        if mapping and "flag" in extra:
            key, value = next(iter(example.items()))
            lines.append(_MAPPING_NOTES.format(flag=extra["flag"].split()[0], key=key, value=_yaml(value)))
    return "\n".join(lines)


def _mapping(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model that owns a field's keys, if the field is a mapping."""
    for annotation in (field.annotation, *typing.get_args(field.annotation)):
        if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
            return annotation
    return None


def _keys(mapping: type[BaseModel]) -> list[str]:
    lines = ["| Key | Values | Default | What it does |", "|---|---|---|---|"]
    return lines + list(_rows(mapping, ""))


def _rows(mapping: type[BaseModel], prefix: str) -> Iterator[str]:
    """Make a row of each key, and below it one of each key of a mapping that it takes."""
    for key, field in mapping.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        inner = _mapping(field)
        default = _yaml(field.get_default(call_default_factory=True)) if not inner or field.default is None else "{}"
        values = extra.get("values") or ("a mapping of the keys below" if inner else _values(field.annotation))
        name = f"{prefix}{field.alias or key}"
        cells = (f"`{name}`", str(values), f"`{default}`", _sentence(field.description or ""))
        yield f"| {' | '.join(map(_cell, cells))} |"
        if inner:
            yield from _rows(inner, f"{name}.")


def _target(row: Graft) -> str:
    module, _, name = qualified_name(row).partition(":")
    verb = "adds " if row.adds else "adds field " if isinstance(row, FieldGraft) else ""
    return f"{verb}`{name}` in `{module}`"


def _upstream(text: str) -> str:
    """Shorten a link to what it names: a repository and a number."""
    if not text.startswith("https://"):
        return text
    *_, repository, _kind, number = text.split("/")
    return f"[{repository}#{number}]({text})"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    return text if text.endswith((".", ":")) else f"{text}."


def _values(annotation: Any) -> str:
    """Say in words what an annotation allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{_yaml(choice)}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("unset" if choice is type(None) else _values(choice) for choice in arguments)
    if origin in (list, tuple, set, frozenset):
        return "a list, each of " + " or ".join(_values(choice) for choice in arguments if choice is not Ellipsis)
    if annotation is bool:
        return "`true` or `false`"
    words = {int: "a whole number", float: "a number", str: "a string", dict: "a mapping"}
    return words.get(origin or annotation, f"`{getattr(annotation, '__name__', annotation)}`")


def _example(field: FieldInfo, extra: Mapping[str, Any]) -> Any:
    """Return a value worth showing: the one that the field states, else one that is not the default."""
    if "example" in extra:
        return extra["example"]
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return not default
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()
    return next((choice for choice in choices if choice != default), default)


def _flag_example(flag: str, value: Any) -> str:
    """Write a flag as a user would: `--[no-]x` takes no value, any other one is followed by it."""
    name = flag.split(maxsplit=1)[0]
    if "[no-]" in name:
        return name.replace("[no-]", "" if value else "no-")
    return f"{name} '{json.dumps(value)}'" if isinstance(value, dict) else f"{name} {_yaml(value)}"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    return str(value)


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(item)}' for key, item in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def pages() -> dict[str, str]:
    """Return the text of every rendered page by its file name."""
    return {
        "grafts.md": render_grafts((heading, rows_of(module, table)) for heading, module, table in _GRAFT_TABLES),
        "options.md": render_options(DiffusionCompileSettings),
        "evidence.md": render_evidence(
            files_of(DOCS / "evidence"), _GENERATED.format(source="the rows of docs/evidence/*.jsonl")
        ),
    }


def out_of_step(folder: Path, texts: Mapping[str, str]) -> str:
    """Return a diff from what is in a folder to what should be; empty when they agree."""
    diffs: list[str] = []
    for name, text in texts.items():
        path = folder / name
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        diffs += difflib.unified_diff(
            there.splitlines(keepends=True), text.splitlines(keepends=True), f"docs/{name}", f"docs/{name} (rendered)"
        )
    return "".join(diffs)


def main(arguments: Sequence[str] | None = None, folder: Path = DOCS) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description="Render docs/grafts.md, docs/options.md and docs/evidence.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail with a diff if out of step")
    options = parser.parse_args(arguments)
    texts = pages()
    if options.check:
        diff = out_of_step(folder, texts)
        if diff:
            print(f"{diff}\nout of step with the code; run: python -m tools.pre_commit.render_docs")
        return 1 if diff else 0
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
