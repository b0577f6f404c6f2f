"""Findings for people and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from splitserve_cli.checks.finding import Finding, State
from splitserve_rpc.printable import printable


def tell(findings: Sequence[Finding], *, is_json: bool, shows_all: bool = False) -> int:
    """Writes them to standard output; returns the exit code: 1 if something is wrong.

    `shows_all`: also what is well.
    """
    sys.stdout.write(_json(findings) if is_json else _text(findings, shows_all=shows_all))
    return int(any(each.state is State.WRONG for each in findings))


def _json(findings: Sequence[Finding]) -> str:
    entries = [{**asdict(each), "state": each.state.value} for each in findings]
    return json.dumps({"findings": entries, "is_well": not _number(findings, State.WRONG)}) + "\n"


def _text(findings: Sequence[Finding], *, shows_all: bool) -> str:
    """What is wrong comes first."""
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
