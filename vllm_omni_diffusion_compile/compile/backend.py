"""Which compiler a name or a dotted path means."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from vllm_omni_diffusion_compile.errors import SettingError
from vllm_omni_diffusion_compile.settings import CONFIG

AUTO = "auto"
INDUCTOR = "inductor"

_OPTION = f"{CONFIG}.backend"

# Backends that torch lists wherever it is installed, and the package that each calls. Source: torch/_dynamo/backends.
_NEEDS = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}

# The settings refuse it; who asks what there is need not hear of it.
_REFUSED = ("cudagraphs",)


def resolve_backend(name: str) -> str | Callable[..., Any]:
    """Return what `torch.compile(backend=...)` takes for a value of the option `backend`.

    A dotted path is imported here and not before, so this is for the process that compiles.

    Args:
        name: `auto`, a name that torch.compile knows, `package.module:callable` or `package.module.callable`.

    Returns:
        `"inductor"` for `auto` (whether the platform supports it is the caller's to ask), the name itself for one that
        torch.compile knows, else the callable. Of a class, an instance made without arguments.

    Raises:
        SettingError: There is no such backend, or it cannot be loaded here.
    """
    if name in (AUTO, INDUCTOR):
        return INDUCTOR
    from torch._dynamo import list_backends, lookup_backend

    names = [known for known in list_backends(exclude_tags=()) if not known.endswith(("_TESTING_ONLY", *_REFUSED))]
    if name in list_backends(exclude_tags=()):
        package = _NEEDS.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise _refusal(name, f"it needs the package {package!r}, which is not installed; install it", names)
        try:
            lookup_backend(name)  # loads one that another distribution brings along as an entry point
        except Exception as error:
            raise _refusal(name, f"loading it failed ({_shown(error)}); mend that installation", names) from error
        return name
    if "." not in name and ":" not in name:
        near = difflib.get_close_matches(name, [AUTO, *names], n=1)
        meant = f"did you mean {near[0]!r}? Otherwise " if near else ""
        raise _refusal(name, f"torch.compile knows no such name; {meant}install the package that brings it", names)
    found = _import(name, names)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            problem = f"the class cannot be made without arguments ({_shown(error)}); name a callable that makes it"
            raise _refusal(name, problem, names) from error
    if not callable(found):
        problem = f"its type is {type(found).__name__}, expected a callable that takes a graph and example inputs"
        raise _refusal(name, f"{problem}; name that", names)
    resolved: Callable[..., Any] = found
    return resolved


def _import(path: str, names: list[str]) -> Any:
    """Import the module of a dotted path and follow the rest of it."""
    module, _, attributes = path.partition(":")
    # Without a colon, the longest part that is a module is taken for one.
    parts = module.split(".")
    shortest = len(parts) if attributes else 1
    for end in range(len(parts) if attributes else len(parts) - 1, shortest - 1, -1):
        candidate = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # Missing is the module itself or a package around it; anything else is missing inside of it.
            missing = error.name or ""
            if end > shortest and (candidate == missing or candidate.startswith(f"{missing}.")):
                continue
            raise _refusal(path, f"importing {candidate!r} failed ({_shown(error)}); install it", names) from error
        except Exception as error:
            problem = f"importing {candidate!r} failed ({_shown(error)}); mend that installation"
            raise _refusal(path, problem, names) from error
        for part in [*parts[end:], *(attributes.split(".") if attributes else ())]:
            owner = found
            found = getattr(owner, part, None)
            if found is None:
                near = difflib.get_close_matches(part, [name for name in dir(owner) if name[0] != "_"], n=1)
                meant = f"did you mean {near[0]!r}?" if near else "name one that it has"
                raise _refusal(path, f"{candidate!r} was imported, but has no {part!r} in it; {meant}", names)
        return found
    raise AssertionError(path)  # a dotted path has at least one part to import


def _refusal(name: str, problem: str, names: list[str]) -> SettingError:
    return SettingError(
        f"{_OPTION} is {name!r}, but {problem}, or use {AUTO!r}. Known: {', '.join(names)}, or a dotted path "
        "'package.module:callable'"
    )


def _shown(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
