"""Checks of the addresses to listen on, of certificates, and of other files of a process."""

from __future__ import annotations

import errno
import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from splitserve_cli.checks.finding import Finding, State, ok, warning, wrong
from splitserve_common import (
    CannotListen,
    Certificate,
    claim_address,
    is_readable_by_others,
    printable,
    read_certificate,
    refusal_of,
)
from splitserve_options import BUNDLED_MODEL, Command, NoCheckpoint, Value, find_checkpoint
from splitserve_rpc import Role, TlsFiles

# In a line of /proc/net/tcp: state of a listening socket, and the column of its inode.
_LISTENS, _INODE = "0A", 9
# Both options may name the same address of a scheduler.
_MAY_BE_ONE = {"listen", "cluster-listen"}
_OURS = "splitserve"
_TAKEN = f"taken by {_OURS}"
# Matched in a command line, wherever the interpreter is and whatever it runs.
_PROGRAMS = {
    "scheduler_service": "splitserve scheduler",
    "executor_service": "splitserve executor",
    "splitserve_gateway": "splitserve gateway",
    "splitserve": _OURS,
}


def check_port(option: str, address: str, *, is_running: bool = False) -> Finding:
    """Checks that a process could listen at `address`, the value of `option`.

    `is_running`: splitserve is known to run, so that it may occupy the port.
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
    meaning = "no process can listen there"
    if number == errno.EACCES:
        return wrong(name, problem, meaning, "use a port above 1023, or grant CAP_NET_BIND_SERVICE")
    if number != errno.EADDRINUSE:
        return wrong(name, problem, meaning, f"give --{option} an address of this machine")
    owner = owner_of(int(address.rpartition(":")[2]))
    if _OURS in owner:
        meaning = "correct if that process is meant to run; a second one cannot start there"
        remedy = f"none if intended; otherwise stop it, or give another --{option}"
        return warning(name, f"taken by {owner}", meaning, remedy)
    meaning = "a splitserve process with this address does not start"
    return warning(name, f"taken by {owner}", meaning, f"stop it, or give another --{option}")


def check_twice(addresses: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Yields a finding for each pair of options with the same address that cannot share it."""
    first: dict[str, str] = {}
    for option, address in addresses:
        other = first.setdefault(address, option)
        if option == other or {option, other} == _MAY_BE_ONE or address.endswith(":0"):
            continue
        meaning = "only one process can listen there: the other does not start"
        yield wrong(
            f"{option} {address}", f"also given as --{other}", meaning, f"give another --{option}"
        )


def owner_of(port: int, proc: Path = Path("/proc")) -> str:
    """Returns the process that listens at a port; processes of other users are not visible."""
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
    return "a process of another user"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except OSError:
        return []


def _name_of(process: Path) -> str:
    """Returns the name of a process without its command line, which may contain secrets."""
    command = (process / "cmdline").read_bytes().decode(errors="replace")
    for program, name in _PROGRAMS.items():
        if program in command:
            return name
    return printable((process / "comm").read_text().strip())


# -- files of a process ----------------------------------------------------------------------------

_ROLES: Mapping[Command, Role] = MappingProxyType(
    {"scheduler": Role.SCHEDULER, "executor": Role.EXECUTOR}
)
_NO_START = "splitserve {} does not start"
# Files that other users of this machine must not read.
_SECRETS = ("cluster_token_file", "gateway_key_file")
_READ = ("api_keys", "tenants", "chat_template")


def check_process_files(command: Command, values: Mapping[str, Value]) -> Iterator[Finding]:
    """Checks certificates, keys, tokens and the model. `values`: options of the process."""
    yield from _check_own_tls(command, values)
    http = _files(values, "http_tls_cert", "http_tls_key", "http_tls_client_ca")
    yield from check_tls_files(http, prefix="http-tls", is_of_authority=False)
    if (client_ca := _path(values, "tls_client_ca")) is not None:
        unreadable = check_readable(client_ca)
        yield from check_authority(client_ca, time.time()) if unreadable is None else [unreadable]
    for name in (*_SECRETS, *_READ):
        if (path := _path(values, name)) is not None:
            yield _check_file(command, path, is_secret=name in _SECRETS)
    if command in ("serve", "executor") and values.get("model") is not None:
        yield _check_model(command, str(values["model"]))


def _check_own_tls(command: Command, values: Mapping[str, Value]) -> list[Finding]:
    own = _files(values, "tls_cert", "tls_key", "tls_ca")
    role = _ROLES.get(command)
    if role is not None and own.cert is None and own.key is None and own.ca is not None:
        meaning = f"{_NO_START.format(command)}: it has no certificate of its own"
        remedy = "also give --tls-cert and --tls-key"
        return [wrong("TLS", f"only {own.ca}", meaning, remedy)]
    names = () if role is None or own.ca is None else (role.dns_name,)
    return check_tls_files(own, names)


def _check_file(command: Command, path: Path, *, is_secret: bool) -> Finding:
    if (unreadable := check_readable(path, _NO_START.format(command))) is not None:
        return unreadable
    status = path.stat()
    mode = f"mode {status.st_mode & 0o7777:04o}"
    if is_secret and is_readable_by_others(status):
        meaning = "other users of this machine can read and use the secret"
        return wrong(f"file {path}", mode, meaning, f"chmod 600 {path}")
    return ok(f"file {path}", mode)


def _check_model(command: Command, model: str) -> Finding:
    if model == BUNDLED_MODEL:
        return ok("checkpoint", model)
    try:
        folder = find_checkpoint(model)
    except NoCheckpoint as problem:
        remedy = (
            "give a checkpoint's folder (config.json, *.safetensors), a GGUF file, or a Hugging"
            " Face id"
        )
        return wrong("checkpoint", str(problem), _NO_START.format(command), remedy)
    return ok("checkpoint", f"{folder or model}{'' if folder else ', from the Hugging Face hub'}")


def _files(values: Mapping[str, Value], *names: str) -> TlsFiles:
    return TlsFiles(*(_path(values, name) for name in names))


def _path(values: Mapping[str, Value], name: str) -> Path | None:
    value = values.get(name)
    return Path(str(value)) if value else None


# -- certificates, keys and authorities ------------------------------------------------------------

_NO_TLS = "TLS connections fail"
_RENEW = "renew it; running processes reload the files"
_CLOCK = "check the clock of this machine"


def check_tls_files(
    files: TlsFiles,
    names: tuple[str, ...] = (),
    now_s: float | None = None,
    prefix: str = "tls",
    *,
    is_of_authority: bool = True,
) -> list[Finding]:
    """Checks the given TLS files. `names`: DNS names, one of which the certificate must have.

    `prefix`: of the option names. `is_of_authority`: whether the authority must also have signed
    the certificate.
    """
    paths = [path for path in (files.cert, files.key, files.ca) if path is not None]
    unreadable = [finding for path in paths if (finding := check_readable(path)) is not None]
    if unreadable:
        return unreadable
    if (files.cert is None) != (files.key is None):
        meaning = "certificate and key are needed together"
        return [
            wrong("TLS", f"only {paths[0]}", meaning, f"give --{prefix}-cert and --{prefix}-key")
        ]
    now_s = time.time() if now_s is None else now_s
    authority = [] if files.ca is None else check_authority(files.ca, now_s)
    if files.cert is None or files.key is None:
        return authority
    trusted_ca = files.ca if is_of_authority and _is_well(authority) else None
    pair = _check_pair(files.cert, files.key, trusted_ca, names, now_s)
    return [check_key_mode(files.key), *pair, *authority]


def check_authority(ca: Path, now_s: float) -> list[Finding]:
    """Checks that `ca` holds certificate authorities that are still valid."""
    name = f"authority {ca}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError):
        remedy = "give the certificate of the authority (PEM)"
        return [wrong(name, "contains no certificate", "it verifies no certificate", remedy)]
    ends_s = [ssl.cert_time_to_seconds(str(each["notAfter"])) for each in context.get_ca_certs()]
    if not ends_s:
        return [ok(name, "contains no authority, only directly trusted certificates")]
    ended = [_date(each) for each in ends_s if each <= now_s]
    if len(ended) == len(ends_s):
        remedy = "create a new authority and certificates (splitserve certs), or " + _CLOCK
        return [wrong(name, f"expired at {max(ended)}", "it verifies no certificate", remedy)]
    return [ok(name, f"expires at {_date(max(ends_s))}")]


def check_key_mode(key: Path) -> Finding:
    """Checks that other users of this machine cannot read a private key."""
    status = key.stat()
    if is_readable_by_others(status):
        return wrong(
            f"key {key}",
            f"mode {status.st_mode & 0o7777:04o}",
            "other users of this machine can read the key and impersonate its owner",
            f"chmod 600 {key}; replace the key if others may have read it",
        )
    return ok(f"key {key}", f"mode {status.st_mode & 0o7777:04o}")


def check_readable(path: Path, meaning: str = _NO_TLS) -> Finding | None:
    """Returns a finding if the file cannot be read; None if it can."""
    try:
        path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        return wrong(f"file {path}", problem, meaning, "check its path, owner and mode")
    return None


def _is_well(findings: list[Finding]) -> bool:
    return all(each.state is State.OK for each in findings)


def _check_pair(
    cert: Path, key: Path, ca: Path | None, names: tuple[str, ...], now_s: float
) -> list[Finding]:
    name = f"certificate {cert}"
    try:
        certificate = read_certificate(cert, key)
    except (ssl.SSLError, OSError, ValueError) as error:
        return [_unusable(name, cert, key, getattr(error, "reason", None) or str(error))]
    findings = [_check_time(name, certificate, now_s)]
    shown = ", ".join(sorted(certificate.dns_names)) or "none"
    if names and certificate.dns_names.isdisjoint(names):
        needed = " or ".join(names)
        remedy = "give the certificate of this process, or issue one: splitserve certs"
        findings.append(
            wrong(
                name, f"DNS names: {shown}", f"requires {needed}: other processes reject it", remedy
            )
        )
    else:
        findings.append(ok(name, f"DNS names: {shown}"))
    if ca is not None and (problem := refusal_of(cert, key, ca)):
        meaning = f"not signed by {ca}: verification against {ca} fails"
        remedy = "give a certificate of this authority, with its whole chain in the file"
        findings.append(wrong(name, problem, meaning, remedy))
    return findings


def _unusable(name: str, cert: Path, key: Path, problem: str) -> Finding:
    """Returns the finding that explains why certificate and key cannot be loaded."""
    if problem == "KEY_VALUES_MISMATCH":
        remedy = "give the private key of this certificate"
        return wrong(name, f"{key} is the key of another certificate", _NO_TLS, remedy)
    if not _has(cert, b"CERTIFICATE"):
        remedy = f"openssl x509 -inform DER -in {cert} -out NEW.crt, if it is in DER form"
        return wrong(name, "contains no PEM certificate", _NO_TLS, remedy)
    if _has(key, b"ENCRYPTED"):
        meaning = "processes cannot ask for the passphrase and do not start"
        remedy = f"openssl pkey -in {key} -out NEW.key, with mode 600"
        return wrong(f"key {key}", "has a passphrase", meaning, remedy)
    if not _has(key, b"PRIVATE KEY"):
        remedy = f"openssl pkey -inform DER -in {key} -out NEW.key, if it is in DER form"
        return wrong(f"key {key}", "contains no PEM private key", _NO_TLS, remedy)
    remedy = "one of the two is damaged (see openssl x509 and openssl pkey): create both again"
    return wrong(name, f"with {key}: {problem}", _NO_TLS, remedy)


def _has(path: Path, what: bytes) -> bool:
    """Returns whether a BEGIN or Proc-Type line of a PEM file contains `what`."""
    marks = (b"-----BEGIN", b"Proc-Type:")
    return any(line.startswith(marks) and what in line for line in path.read_bytes().splitlines())


def _check_time(name: str, certificate: Certificate, now_s: float) -> Finding:
    begins_s, ends_s = certificate.begins_s, certificate.ends_s
    if ends_s <= now_s:
        return wrong(name, f"expired at {_date(ends_s)}", "all peers reject it", _RENEW)
    if begins_s > now_s:
        meaning = "all peers reject it until then, or this clock is wrong"
        return wrong(name, f"not valid before {_date(begins_s)}", meaning, _CLOCK)
    if ends_s - now_s < certificate.soon_s:
        return warning(
            name, f"expires at {_date(ends_s)}", "from then on all peers reject it", _RENEW
        )
    return ok(name, f"expires at {_date(ends_s)}")


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))
