"""Whether addresses to listen on are free, and who has them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_rpc.addresses import CannotListen, claim_address
from splitserve_rpc.printable import printable

# Of a line of /proc/net/tcp: what says that a socket listens, and the column of its inode.
_LISTENS, _INODE = "0A", 9
# By these a scheduler is told to have one address for all.
_MAY_BE_ONE = {"listen", "cluster-listen"}
_OURS = "splitserve"
_TAKEN = f"taken by {_OURS}"
# In a command line; wherever the interpreter lies, and whatever it is told to run.
_PROGRAMS = {
    "scheduler_service": "splitserve scheduler",
    "executor_service": "splitserve executor",
    "splitserve_gateway": "splitserve gateway",
    "splitserve": _OURS,
}


def check_port(option: str, address: str, *, is_running: bool = False) -> Finding:
    """Whether a process could listen at `address`, as `option` says.

    `is_running`: splitserve is known to run, so that it is no news if it has the port.
    """
    name = f"{option} {address}"
    try:
        claim_address(address)
    except CannotListen as problem:
        cause = problem.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        found = _refused(name, option, address, number, str(problem))
        return ok(name, found.found) if is_running and found.found.startswith(_TAKEN) else found
    return ok(name, "free")


def _refused(name: str, option: str, address: str, number: int | None, problem: str) -> Finding:
    nobody = "nothing can listen there"
    if number == errno.EACCES:
        return wrong(name, problem, nobody, "a port above 1023, or CAP_NET_BIND_SERVICE")
    if number != errno.EADDRINUSE:
        return wrong(name, problem, nobody, f"--{option}: an address of this machine")
    owner = owner_of(int(address.rpartition(":")[2]))
    if _OURS in owner:
        meaning = "if that is what is meant to run, all is well; one more does not start there"
        remedy = f"nothing; or end that, or another --{option}"
        return warning(name, f"taken by {owner}", meaning, remedy)
    meaning = "a process of splitserve that is to listen there does not start"
    return warning(name, f"taken by {owner}", meaning, f"end that, or another --{option}")


def check_twice(addresses: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Options that name the same address, and whose processes cannot both have it."""
    first: dict[str, str] = {}
    for option, address in addresses:
        other = first.setdefault(address, option)
        if option == other or {option, other} == _MAY_BE_ONE or address.endswith(":0"):
            continue
        meaning = "only one of both can listen there: it does not start"
        yield wrong(f"{option} {address}", f"also --{other}", meaning, f"another --{option}")


def owner_of(port: int, proc: Path = Path("/proc")) -> str:
    """Who listens at a port, as far as that can be known: others' processes are not shown."""
    inodes = {
        fields[_INODE]
        for table in ("tcp", "tcp6")
        for line in _lines(proc / "net" / table)
        if len(fields := line.split()) > _INODE
        and fields[3] == _LISTENS
        and int(fields[1].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(each) in wanted for each in (process / "fd").iterdir()):
                return f"{_name_of(process)} (process {process.name})"
    return "a process that is not shown to us"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except OSError:
        return []


def _name_of(process: Path) -> str:
    """Not its whole command line, in which there may be secrets."""
    command = (process / "cmdline").read_bytes().decode(errors="replace")
    for program, name in _PROGRAMS.items():
        if program in command:
            return name
    return printable((process / "comm").read_text().strip())
