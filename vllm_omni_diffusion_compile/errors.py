"""Every error this package raises on purpose.

DiffusionCompileError
├── SettingError      an option that the user gave: wrong value, wrong type, a name that is nearly one of ours
└── GraftError        vLLM-Omni is not what a graft expects
    └── ...           names target, expected and found; nothing of the target's module has been touched
"""


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
