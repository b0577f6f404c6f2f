"""Findings of checks, their output, and the check of a process's options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from splitserve_common import printable
from splitserve_options import (
    Command,
    OptionError,
    OptionKind,
    Value,
    options_of,
    resolve,
    unknown_variables,
)


class State(Enum):
    """Result of a check.

    WARNING: works now, but may fail later or could work better. WRONG: does not work.
    """

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check.

    `name`: the subject. `meaning`, `remedy`: consequence, and action to take.
    """

    name: str
    state: State
    found: str
    meaning: str = ""
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(name, State.OK, found)


def warning(name: str, found: str, meaning: str, remedy: str) -> Finding:
    """Returns a finding of the state WARNING; see State."""
    return Finding(name, State.WARNING, found, meaning, remedy)


def wrong(name: str, found: str, meaning: str, remedy: str) -> Finding:
    """Returns a finding of the state WRONG; see State."""
    return Finding(name, State.WRONG, found, meaning, remedy)


# -- output of findings ----------------------------------------------------------------------------


def write_findings(findings: Sequence[Finding], *, is_json: bool, shows_all: bool = False) -> int:
    """Writes findings to standard output; returns the exit code: 1 if something is wrong.

    `shows_all`: also findings without a problem.
    """
    sys.stdout.write(_json(findings) if is_json else _text(findings, shows_all=shows_all))
    return int(any(each.state is State.WRONG for each in findings))


def _json(findings: Sequence[Finding]) -> str:
    entries = [{**asdict(each), "state": each.state.value} for each in findings]
    return json.dumps({"findings": entries, "is_well": not _number(findings, State.WRONG)}) + "\n"


def _text(findings: Sequence[Finding], *, shows_all: bool) -> str:
    """Returns findings as text, the wrong ones first."""
    lines: list[str] = []
    for state in (State.WRONG, State.WARNING, State.OK):
        for each in findings:
            if each.state is state and (shows_all or state is not State.OK):
                lines += _lines(each)
    lines.append(
        f"{_number(findings, State.WRONG)} wrong, {_number(findings, State.WARNING)} warnings,"
        f" {_number(findings, State.OK)} ok"
    )
    return "\n".join(lines) + "\n"


def _lines(each: Finding) -> Iterator[str]:
    yield printable(f"{each.state.value:8} {each.name}: {each.found}")
    if each.meaning:
        yield printable(f"{'':9}{each.meaning}")
    if each.remedy:
        yield printable(f"{'':9}-> {each.remedy}")


def _number(findings: Sequence[Finding], state: State) -> int:
    return sum(each.state is state for each in findings)


# -- options of a process, from its file and the environment ---------------------------------------


def check_settings(
    command: Command, config: Path | None, environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, Value]]:
    """Checks the options of a process; returns findings and the values, empty if invalid."""
    name = f"options of {command}"
    flags: Sequence[str] = [] if config is None else [f"--config={config}"]
    try:
        values = resolve(command, flags, environ)
    except OptionError as error:
        return [wrong(name, str(error), f"splitserve {command} does not start", "correct it")], {}
    findings = [ok(name, "valid")]
    if unknown := unknown_variables(environ):
        findings.append(warning("environment", unknown, "they are ignored", "check their spelling"))
    return findings, values


def listened_at(command: Command, values: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """Yields the options that name an address to listen on, and the addresses."""
    for option in options_of(command):
        value = values.get(option.key)
        is_own = "listen" in option.name or option.name == "http"
        if option.kind is OptionKind.ADDRESS and is_own and isinstance(value, str):
            for address in _addresses(command, option.name, value, values):
                yield option.name, address


def _addresses(
    command: Command, name: str, address: str, values: Mapping[str, Value]
) -> Iterator[str]:
    """Yields the addresses for one option; `serve` gives each process its own metrics address."""
    host, _, port = address.rpartition(":")
    if (command, name) != ("serve", "metrics-listen") or not int(port):
        yield address
        return
    num_executors = values.get("num_executors") or 1
    assert isinstance(num_executors, int)
    # Order of `serve_config.metrics_flags`: scheduler, gateway, executors.
    for each in range(2 + num_executors):
        yield f"{host}:{int(port) + each}"
