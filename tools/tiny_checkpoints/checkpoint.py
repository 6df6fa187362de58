"""What the tiny checkpoints share: where they lie, when they are complete, and a tokenizer that needs no download."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen2TokenizerFast

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_ROOT = REPOSITORY / ".cache" / "checkpoints"
MARKER = ".complete"


def folder(name: str, version: str) -> Path:
    """Return where a checkpoint lies by default.

    The version is in the name: a checkpoint that another branch wrote stays, with the servers that have it open.
    """
    return DEFAULT_ROOT / f"{name}-{version}"


def made(name: str) -> Path:
    """Return the folder of the checkpoint that a module of this package makes, after a process has made it."""
    module = importlib.import_module(f"tools.tiny_checkpoints.{name}")
    subprocess.run([sys.executable, "-m", module.__name__], cwd=REPOSITORY, check=True)
    return folder(name, module.VERSION)


def run(name: str, version: str, write: Callable[[Path], None], arguments: Sequence[str] | None = None) -> Path:
    """Write a checkpoint unless it is there already; the whole command line of a checkpoint module.

    Args:
        name: Of the folder below `.cache/checkpoints` that is used when the command line names none.
        version: Changes whenever `write` would write something else; part of that folder's name, and recorded in the
            marker file.
        write: Fills an empty folder.
        arguments: Command line without the program; None for that of the process.

    Returns:
        The folder with the checkpoint.
    """
    parser = argparse.ArgumentParser(description=f"Write the checkpoint {name}: random weights, no download.")
    parser.add_argument(
        "out", nargs="?", type=Path, default=folder(name, version), help="folder (default: %(default)s)"
    )
    out: Path = parser.parse_args(arguments).out
    marker = out / MARKER
    if marker.is_file() and marker.read_text() == version:
        print(f"{out}: complete")
        return out
    if out.exists():
        if any(out.iterdir()) and not marker.exists():
            raise SystemExit(f"{out} is not empty and not a checkpoint of this tool; name another folder or remove it")
        shutil.rmtree(out)
    started = time.monotonic()
    # Written beside its final place and renamed: a run that was interrupted leaves no half checkpoint behind.
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write(unfinished)
    (unfinished / MARKER).write_text(version)
    unfinished.rename(out)
    size_mb = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    print(f"{out}: {size_mb:.1f} MB in {time.monotonic() - started:.1f} s")
    return out


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write indented JSON, creating the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def byte_tokenizer(special_tokens: Sequence[str], chat_template: str) -> Qwen2TokenizerFast:
    """Return a tokenizer with one token a byte, in the class that Qwen-based pipelines expect.

    Args:
        special_tokens: Special tokens beyond the pad token `<|endoftext|>` and the end token `<|im_end|>`.
        chat_template: Jinja template over `messages`.
    """
    # Imported where they are needed, here and in the checkpoint modules: a call that finds its work done takes no time.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2TokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special_tokens),
    )
    fast.chat_template = chat_template
    return fast
