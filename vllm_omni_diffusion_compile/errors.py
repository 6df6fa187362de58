"""Every error this package raises on purpose.

DiffusionCompileError
├── SettingError      an option that the user gave: wrong value, wrong type, a name that is nearly one of ours
├── GraftError        vLLM-Omni is not what a graft expects
│   └── ...           names target, expected and found; nothing of the target's module has been touched
├── WarmupError       a declared shape that the server was to be warm for could not be warmed
├── ReportError       a report on a start that is not there, or none
├── BenchError        what a bench was asked for, or what one of its servers did
├── ComponentError    a pipeline declares a component that does not exist
├── RequestError      a request, or one line of a trace of requests, that cannot be served as it asks
├── RankFailedError   a compiled region failed on one of several ranks, and that fails the request
├── EvidenceError    a row of evidence that is not one, or a combination without the evidence that is asked for
├── BundleError       a bundle of compiled artifacts that is damaged, foreign, or not what it says it is
└── UnsafeDirectoryError   a place for compiled artifacts that others can write
"""

from typing import Literal


class DiffusionCompileError(Exception):
    """Base of all errors of this package."""


class SettingError(DiffusionCompileError, ValueError):
    """A setting that cannot be honoured. The message names it as the user typed it."""


class GraftError(DiffusionCompileError, RuntimeError):
    """A target of a graft does not look as expected, so nothing of its module was changed.

    Args:
        target: `module:Qualified.name` of what was to be grafted.
        expected: What the graft was written for.
        found: What the installed release has.
        remedy: What the reader can do.
    """

    def __init__(self, target: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"cannot graft {target}: expected {expected}, found {found}; {remedy}")
        self.target = target
        self.expected = expected
        self.found = found
        self.remedy = remedy


class ComponentError(DiffusionCompileError, AttributeError):
    """A declared path that resolves to nothing. The message names the path and the part that is missing."""


class WarmupError(DiffusionCompileError, RuntimeError):
    """A declared shape that could not be warmed, where `warmup.on_failure` is `fail`. The message names it."""


class ReportError(DiffusionCompileError, ValueError):
    """A file or an address that gives no report on a start."""


class BenchError(DiffusionCompileError, RuntimeError):
    """Arms that cannot be measured as they are asked for, or a server of one that failed. The message says which."""


class RequestError(DiffusionCompileError, ValueError):
    """A request that cannot be served as it asks. The message names the key, its value and what was expected.

    Args:
        message: For the one who sent the request.
        status: What HTTP answers: 400 for what is wrong, 413 for what is too large.
    """

    def __init__(self, message: str, *, status: Literal[400, 413] = 400) -> None:
        super().__init__(message)
        self.status = status


class RankFailedError(DiffusionCompileError, RuntimeError):
    """A compiled region failed on one of several ranks, and that fails the request.

    Either it failed in the middle of what it does together with others: running it again there would send twice what
    the other ranks expect once. Or failures are to be raised.

    Args:
        rank: The rank that failed.
        where: Component and region.
        error: Type of what the compiled region raised, and its text.
        communicated: Whether it failed in the middle of what it does together with others.
    """

    def __init__(self, rank: int, where: str, error: str, *, communicated: bool = True) -> None:
        failed = (
            f"rank {rank}: the compiled {where} failed after it had communicated with the other ranks ({error}), so it "
            "cannot be run again eagerly"
            if communicated
            else f"rank {rank}: the compiled {where} failed ({error}), and on_failure is 'raise'"
        )
        super().__init__(f"{failed}; restart the stage, with --enforce-eager if it happens again")
        self.rank = rank
        self.where = where


class EvidenceError(DiffusionCompileError, ValueError):
    """No row of evidence, or none for what is to run. The message names file, line and field."""


class BundleError(DiffusionCompileError, ValueError):
    """A bundle of compiled artifacts cannot be used. The message names the file and what is wrong with it."""


class UnsafeDirectoryError(DiffusionCompileError, PermissionError):
    """Others can write where compiled artifacts, which are code, would be read. The message names the remedy."""
