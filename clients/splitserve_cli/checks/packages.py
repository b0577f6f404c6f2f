"""Whether Python and the packages are those that this software was made for."""

from __future__ import annotations

import platform
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_options.option import Command

VersionOf = Callable[[str], str | None]
RequirementsOf = Callable[[str], Iterable[str]]
# What processes need beside what all do.
_EXTRAS: Mapping[Command, tuple[str, ...]] = MappingProxyType(
    {
        "serve": ("", "gateway", "executor"),
        "scheduler": ("",),
        "executor": ("", "executor"),
        "gateway": ("", "gateway"),
    }
)
_TRACES = "otel"
_WITHOUT_GPU = re.compile(r"\+cpu\b")


def installed_version(name: str) -> str | None:
    """None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_requirements(name: str) -> list[str]:
    """What a package that is here says that it needs."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


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
    requirements_of: RequirementsOf = installed_requirements,
    *,
    has_traces: bool = False,
) -> list[Finding]:
    """Those that a process needs, one finding for each extra of the package.

    `requirements`: None for what this software says of itself. `requirements_of`: what others say.
    `has_traces`: whether the process is to send some.
    """
    if requirements is None:
        requirements = installed_requirements("splitserve")
    parsed = [Requirement(each) for each in requirements]
    extras = (*_EXTRAS[command], *((_TRACES,) if has_traces else ()))
    return [_check_part(extra, parsed, version_of, requirements_of) for extra in extras]


def check_torch(device: object, has_gpu: bool, version: str | None) -> Finding | None:
    """Whether torch can use what the executor is to compute on; None: nothing is to be said.

    `version`: of torch, whose build is part of it.
    """
    if version is None or not _WITHOUT_GPU.search(version):
        return None
    found, remedy = (
        f"torch {version} is built without CUDA",
        "pip install torch, as pytorch.org says",
    )
    if device == "cuda":
        meaning = "--device cuda: an executor does not start"
        return wrong("torch", found, meaning, f"{remedy}; or --device cpu")
    if has_gpu and device != "cpu":
        return warning("torch", found, "there is a GPU, and an executor does not use it", remedy)
    return None


def _check_part(
    extra: str,
    requirements: list[Requirement],
    version_of: VersionOf,
    requirements_of: RequirementsOf,
) -> Finding:
    name = f"packages of {extra or 'all'}"
    versions = {each: version_of(each.name) for each in _needed(extra, requirements)}
    problems = [
        f"{each.name} is {version or 'missing'}, not {each.specifier}"
        for each, version in versions.items()
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]
    names = [each.name for each, version in versions.items() if version is not None]
    problems += _needed_by_others(names, version_of, requirements_of)
    if problems:
        what = f"'splitserve[{extra}]'" if extra else "splitserve"
        meaning = "processes end at once, or fail in strange ways"
        remedy = f"pip install {what}, into a venv of its own"
        return wrong(name, ", ".join(problems), meaning, remedy)
    return ok(name, ", ".join(f"{each.name} {version}" for each, version in versions.items()))


def _needed_by_others(
    names: Iterable[str], version_of: VersionOf, requirements_of: RequirementsOf
) -> Iterator[str]:
    """What packages that are here demand of others, and these of others again."""
    todo = deque(names)
    seen = set(todo)
    while todo:
        name = todo.popleft()
        for each in _needed("", map(Requirement, requirements_of(name))):
            version = version_of(each.name)
            if version is None or not each.specifier.contains(version, prereleases=True):
                wanted = each.specifier or "any version"
                yield f"{each.name} is {version or 'missing'}, {name} takes {wanted}"
            elif each.name not in seen:
                seen.add(each.name)
                todo.append(each.name)


def _needed(extra: str, requirements: Iterable[Requirement]) -> Iterator[Requirement]:
    for each in requirements:
        if each.marker is None or not _is_of_extra(each):
            if not extra and (each.marker is None or each.marker.evaluate({"extra": ""})):
                yield each
        elif extra and each.marker.evaluate({"extra": extra}):
            yield each


def _is_of_extra(requirement: Requirement) -> bool:
    return "extra" in str(requirement.marker)
