"""The command line `vllm-omni-compile`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.commands import buckets
from vllm_omni_diffusion_compile.errors import DiffusionCompileError

PROGRAM = "vllm-omni-compile"
_DESCRIPTION = "Plan, inspect and qualify compiled diffusion serving with vLLM-Omni."
# What argparse exits with too.
_USAGE = 2


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command.

    Args:
        help: What it does, in a line.
        add_arguments: Adds its arguments to a parser. Imports nothing heavy: it runs for the help of any command.
        run: Does it with the parsed arguments and returns the exit status; what it raises of this package's errors is
            printed as one line.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Mapping[str, Command] = {
    "buckets": Command(help=buckets.HELP, add_arguments=buckets.add_arguments, run=buckets.run),
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
            commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
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
