"""Whether Python and the packages are those that this software was made for."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from splitserve_cli.checks.finding import Finding, ok, wrong
from splitserve_options.option import Command

VersionOf = Callable[[str], str | None]
# What processes need beside what all do.
_EXTRAS: Mapping[Command, tuple[str, ...]] = MappingProxyType(
    {
        "serve": ("", "gateway", "executor"),
        "scheduler": ("",),
        "executor": ("", "executor"),
        "gateway": ("", "gateway"),
    }
)


def installed_version(name: str) -> str | None:
    """None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_python(
    version: tuple[int, ...] = sys.version_info[:3], needed: str | None = None
) -> Finding:
    """`needed`: None for what this software says of itself."""
    if needed is None:
        needed = metadata.metadata("splitserve")["Requires-Python"]
    text = ".".join(map(str, version))
    if SpecifierSet(needed).contains(text):
        return ok("python", f"{text} ({platform.python_implementation()})")
    return wrong("python", text, f"it takes {needed}", "run it with another Python")


def check_packages(
    command: Command,
    requirements: Iterable[str] | None = None,
    version_of: VersionOf = installed_version,
) -> list[Finding]:
    """Those that a process needs, one finding for each extra of the package.

    `requirements`: None for what this software says of itself.
    """
    if requirements is None:
        requirements = metadata.requires("splitserve") or []
    parsed = [Requirement(each) for each in requirements]
    return [_check_part(extra, parsed, version_of) for extra in _EXTRAS[command]]


def _check_part(extra: str, requirements: list[Requirement], version_of: VersionOf) -> Finding:
    name = f"packages of {extra or 'all'}"
    versions = {each: version_of(each.name) for each in _needed(extra, requirements)}
    problems = [
        f"{each.name} is {version or 'missing'}, not {each.specifier}"
        for each, version in versions.items()
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]
    if problems:
        what = f"'splitserve[{extra}]'" if extra else "splitserve"
        meaning = "processes end at once, or fail in strange ways"
        remedy = f"pip install {what}, into a venv of its own"
        return wrong(name, ", ".join(problems), meaning, remedy)
    return ok(name, ", ".join(f"{each.name} {version}" for each, version in versions.items()))


def _needed(extra: str, requirements: list[Requirement]) -> Iterator[Requirement]:
    for each in requirements:
        if each.marker is None:
            if not extra:
                yield each
        elif extra and each.marker.evaluate({"extra": extra}):
            yield each
