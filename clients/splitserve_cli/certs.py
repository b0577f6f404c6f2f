"""Command `splitserve certs`: a certificate authority and certificates for mTLS."""

from __future__ import annotations

import argparse
import ipaddress
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from splitserve_rpc import DOMAIN, Role

# Has no role in the cluster: the scheduler sees the gateway as a client.
_GATEWAY = "gateway"
_SERVERS = (Role.SCHEDULER.value, _GATEWAY)
_LOCAL = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_MAX_DAYS = 3650
_HELP = """\
Creates a certificate authority and certificates for the processes of a cluster: DIR/ca.crt, and
NAME.crt with NAME.key for scheduler, executor, operator and gateway. Another run keeps the
authority and renews the certificates, for their present names and those of --host; running
processes reload them. To drop host names, remove NAME.crt first.
"""


def _check_names(clients: Sequence[str], hosts: Sequence[str], taken: Collection[str]) -> None:
    """Checks the names. Raises ValueError for an invalid name, or one that names a role."""
    for name in clients:
        if not _NAME.fullmatch(name) or name in {*taken, "ca"}:
            raise ValueError(f"--client is {name!r}: reserved, or not of letters, digits and '.-_'")
    for host in hosts:
        if not _HOST.fullmatch(host) and not _is_address(host):
            raise ValueError(f"--host is {host!r}; allowed: a host name or an IP address")
    for name in (*clients, *hosts):
        # Compared like host names: without case, and without the dot of the root domain.
        if name.lower().rstrip(".").endswith(DOMAIN):
            raise ValueError(f"{name!r} is reserved: names of {DOMAIN} are roles of the cluster")


def _host_of(text: str) -> tuple[str | None, str]:
    """Splits a value of --host; returns the server, None for all servers, and the host."""
    name, is_given, host = text.partition("=")
    return (name, host) if is_given and name in _SERVERS else (None, text)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: 1 to {_MAX_DAYS}")
    return int(text)


def _fail(problem: str) -> int:
    """Writes the problem to standard error; returns the exit code."""
    sys.stderr.write(f"splitserve certs: {problem}\n")
    return 1


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        from splitserve_cli.certificates import issue_all
    except ImportError:
        return _fail("needs cryptography: pip install 'splitserve[security]'")
    directory: Path = arguments.directory
    try:
        names = _names(arguments.client, arguments.host)
        issue_all(directory, names, arguments.days, in_folders=arguments.folders)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return _fail(str(error))
    sys.stdout.write(f"{directory}: ca, {', '.join(names)}; keep ca.key secret\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="splitserve certs", description=_HELP)
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder for the files")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or address at which clients reach scheduler and gateway; for only one of"
        " them: scheduler=NAME or gateway=NAME; repeatable",
    )
    parser.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="NAME",
        help="also creates a certificate for a client; repeatable",
    )
    parser.add_argument(
        "--folders",
        action="store_true",
        help="write NAME/tls.crt, NAME/tls.key and NAME/ca.crt: one folder for each process",
    )
    parser.add_argument("--days", type=_days, default=90, help="lifetime in days (default: 90)")
    return parser


def _names(clients: Sequence[str], hosts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the host names of each certificate. Raises ValueError."""
    named = [_host_of(text) for text in hosts]
    names = {role.value: [role.dns_name] for role in Role} | {_GATEWAY: []}
    for name in _SERVERS:
        reached = (host for of, host in named if of in {name, None})
        names[name].extend(dict.fromkeys((*_LOCAL, *reached)))
    _check_names(clients, [host for _, host in named], names)
    return names | {name: [name] for name in clients}
