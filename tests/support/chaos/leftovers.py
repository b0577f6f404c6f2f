"""What processes hold, and which processes there are: what of it stays is a leak."""

from __future__ import annotations

import os
from pathlib import Path

from tests.contract.stranger.process import poll
from tests.support.chaos.stack import Stack
from tests.support.processes.patience import PATIENCE_S

# gRPC opens and closes some when it likes.
_NUM_SPARE_FILES = 4


def files_of(stack: Stack) -> dict[str, int]:
    """How many files each process has open."""
    return {name: len(os.listdir(f"/proc/{stack.pid(name)}/fd")) for name in stack.processes}


async def wait_for_nothing(stack: Stack, before: dict[str, int]) -> None:
    """Waits until no request, block and file is left. Raises TimeoutError."""
    await stack.wait_idle()
    # Who was at another scheduler for a while stays connected to both.
    num_spare = _NUM_SPARE_FILES + stack.num_executors + 2 * len(stack.clients)

    async def look() -> tuple[bool, object]:
        found = files_of(stack)
        left = {
            name: (num_files, before[name])
            for name, num_files in found.items()
            if num_files > before[name] + num_spare
        }
        return not left, left

    await poll(look, PATIENCE_S)


async def wait_for_no_process(stack: Stack) -> None:
    """Waits until no process lives that any of the stack began. Raises TimeoutError."""

    async def look() -> tuple[bool, object]:
        left = [line for line in map(_session_of, os.listdir("/proc")) if line[0] in stack.sessions]
        return not left, left

    await poll(look, PATIENCE_S)


def _session_of(name: str) -> tuple[int, str]:
    """Of a process that lives; 0 if it does not, or is none."""
    try:
        line = Path("/proc", name, "stat").read_text()
    except OSError:
        return 0, ""
    # The name of a program, in parentheses, may hold anything.
    state, _parent, _group, session = line.rpartition(")")[2].split()[:4]
    return (0 if state in "ZX" else int(session)), line


def complaints(stack: Stack) -> list[str]:
    """What the logs say that no fault of others excuses."""
    return [
        f"{name}: {line}"
        for name in stack.processes
        for line in stack.log(name).read_text(errors="replace").splitlines()
        if any(sign in line for sign in _BUGS)
        or (" ERROR " in line and not any(event in line for event in _EXCUSED))
    ]


_BUGS = ("was destroyed but", "never retrieved", "never awaited", "INVARIANT_BROKEN")
# The disk was full; a request was as deadly as it was meant to be; an executor as sick.
_EXCUSED = (
    " journal_stopped ",
    " request_kills_executors ",
    " executor_withdrawn ",
    " step_failed ",
)
