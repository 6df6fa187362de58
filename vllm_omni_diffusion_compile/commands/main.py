"""The command line `vllm-omni-compile`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.commands import bench, buckets, cache, doctor, qualify, rainfusion, report
from vllm_omni_diffusion_compile.errors import DiffusionCompileError

PROGRAM = "vllm-omni-compile"
_DESCRIPTION = "Plan, inspect and qualify compiled diffusion serving with vLLM-Omni."
# What argparse exits with too.
_USAGE = 2


class Command(Protocol):
    """One command: a module of this folder."""

    HELP: str
    """What it does, in a line."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Add its arguments to a parser. Imports nothing heavy: it runs for the help of any command."""

    def run(self, options: argparse.Namespace, /) -> int:
        """Do it and return the exit status; what it raises of this package's errors is printed as one line."""


COMMANDS: Mapping[str, Command] = {
    "bench": bench,
    "buckets": buckets,
    "cache": cache,
    "doctor": doctor,
    "qualify": qualify,
    "rainfusion": rainfusion,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status.

    Args:
        arguments: What follows the program's name; those of the process if None.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        )
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command].run(options)
    except DiffusionCompileError as error:
        print(f"{PROGRAM} {options.command}: error: {error}", file=sys.stderr)
        return _USAGE
    except BrokenPipeError:
        # The reader has seen enough. Nothing more can be written, not even by the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
