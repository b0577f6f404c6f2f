"""Checks of Python and of the packages that this software requires."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_cli.extras import MODULES
from splitserve_options import Command

VersionOf = Callable[[str], str | None]
RequirementsOf = Callable[[str], Iterable[str]]
WhyNotImported = Callable[[str], str | None]
# Extras that each process needs.
_EXTRAS: Mapping[Command, tuple[str, ...]] = MappingProxyType(
    {
        "serve": ("", "gateway", "executor"),
        "scheduler": ("",),
        "executor": ("", "executor"),
        "gateway": ("", "gateway"),
    }
)
_TRACES = "otel"
# Packages that indicate an extra was installed; its other packages come with many programs.
_MAIN_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gateway": ("fastapi", "uvicorn"), "executor": ("torch", "transformers")}
)
_IMPORT = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
_IMPORT_TIMEOUT_S = 120
_WITHOUT_GPU = re.compile(r"\+cpu\b")


def installed_version(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_requirements(name: str) -> list[str]:
    """Returns the requirements that an installed package declares; none if it is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def why_not_imported(extra: str) -> str | None:
    """Returns why the modules of `extra` cannot be imported; None if a separate process can.

    Modules of a base install can be imported: this module needs them.
    """
    modules = MODULES.get(extra, ())
    command = [sys.executable, "-P", "-c", _IMPORT, *modules]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else None


def command_installed(version_of: VersionOf = installed_version) -> Command:
    """Returns the process with the most parts that can run here: `serve` with all extras."""
    has = {extra: any(map(version_of, names)) for extra, names in _MAIN_PACKAGES.items()}
    if has["executor"]:
        return "serve" if has["gateway"] else "executor"
    return "gateway" if has["gateway"] else "scheduler"


def check_python(
    version: tuple[int, ...] = sys.version_info[:3], needed: str | None = None
) -> Finding:
    """Checks the Python version.

    `needed`: required versions; None for those this package declares.
    """
    if needed is None:
        needed = metadata.metadata("splitserve")["Requires-Python"]
    text = ".".join(map(str, version))
    if SpecifierSet(needed).contains(text):
        return ok("python", f"{text} ({platform.python_implementation()})")
    return wrong("python", text, f"requires {needed}", "use another Python")


def check_packages(
    command: Command | None,
    requirements: Iterable[str] | None = None,
    version_of: VersionOf = installed_version,
    requirements_of: RequirementsOf = installed_requirements,
    why_not_imported: WhyNotImported = why_not_imported,
    *,
    has_traces: bool = False,
) -> list[Finding]:
    """Checks the packages that a process needs; returns one finding for each extra.

    `command`: the process; None if unknown, so that extras may be missing. `requirements`: None for
    those this package declares. `requirements_of`: returns those of other packages. `has_traces`:
    whether the process is to export traces.
    """
    if requirements is None:
        requirements = installed_requirements("splitserve")
    parsed = [Requirement(each) for each in requirements]
    extras = (*_EXTRAS[command or "serve"], *((_TRACES,) if has_traces else ()))
    installed = _Installed(parsed, version_of, requirements_of, why_not_imported)
    return [installed.check(extra, is_needed=command is not None) for extra in extras]


def check_torch(device: object, has_gpu: bool, version: str | None) -> Finding | None:
    """Checks that torch can use the executor's device; None if there is nothing to report.

    `version`: version of torch, including its build.
    """
    if version is None or not _WITHOUT_GPU.search(version):
        return None
    found, remedy = (
        f"torch {version} is built without CUDA",
        "pip install torch, as described on pytorch.org",
    )
    if device == "cuda":
        meaning = "executors with --device cuda do not start"
        return wrong("torch", found, meaning, f"{remedy}; or --device cpu")
    if has_gpu and device != "cpu":
        return warning("torch", found, "executors do not use the GPU of this machine", remedy)
    return None


@dataclass(frozen=True, slots=True)
class _Installed:
    """Requirements of this software, and installed packages."""

    requirements: list[Requirement]
    version_of: VersionOf
    requirements_of: RequirementsOf
    why_not_imported: WhyNotImported

    def check(self, extra: str, *, is_needed: bool) -> Finding:
        """Checks the packages of `extra`.

        `is_needed`: whether a process that needs `extra` will run.
        """
        name = f"packages of {extra or 'all'}"
        what = f"'splitserve[{extra}]'" if extra else "splitserve"
        remedy = f"pip install {what}, in a separate venv"
        versions = {each: self.version_of(each.name) for each in _needed(extra, self.requirements)}
        missing = [each.name for each, version in versions.items() if version is None]
        may_be_missing = not is_needed and extra in _MAIN_PACKAGES
        if may_be_missing and not any(map(self.version_of, _MAIN_PACKAGES[extra])):
            return ok(name, f"not installed; to run the {extra} here: pip install {what}")
        problems = [
            f"{each.name} is {version or 'missing'}, required: {each.specifier or 'any version'}"
            for each, version in versions.items()
            if version is None or not each.specifier.contains(version, prereleases=True)
        ]
        if may_be_missing and len(problems) == len(missing) > 0:
            meaning = f"splitserve {extra} and splitserve serve do not start"
            return warning(name, f"missing: {', '.join(missing)}", meaning, f"if needed: {remedy}")
        own = {each.name for each in _needed("", self.requirements)} | {
            each.name for each in versions
        }
        demands = list(self._demands([each.name for each, v in versions.items() if v is not None]))
        found = ", ".join([*problems, *(text for _, text in demands)])
        if problems or any(demanded in own for demanded, _ in demands):
            return wrong(name, found, "processes exit at start, or fail unpredictably", remedy)
        if demands:
            # Only an import shows whether the affected part of a package is used.
            if (why := self.why_not_imported(extra)) is not None:
                return wrong(name, f"{found}: {why}", "processes exit at start", remedy)
            return warning(
                name, found, "but all modules that the processes import are available", remedy
            )
        return ok(name, ", ".join(f"{each.name} {version}" for each, version in versions.items()))

    def _demands(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yields unmet requirements of installed packages and of the packages that they require.

        Yields the required package, and a text with the requiring package and version.
        """
        todo = deque(names)
        seen = set(todo)
        while todo:
            name = todo.popleft()
            for each in _needed("", map(Requirement, self.requirements_of(name))):
                version = self.version_of(each.name)
                if version is None or not each.specifier.contains(version, prereleases=True):
                    wanted = each.specifier or "any version"
                    text = f"{each.name} is {version or 'missing'}, {name} requires {wanted}"
                    yield each.name, text
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
