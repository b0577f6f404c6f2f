"""Whether certificates, keys and authorities are of use."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from splitserve_cli.checks.finding import Finding, ok, warning, wrong
from splitserve_rpc.certificate import Certificate, read_certificate, refusal_of
from splitserve_rpc.secret_files import is_readable_by_others
from splitserve_rpc.tls import TlsFiles

_NO_TLS = "nobody can connect with it"


def check_tls_files(
    files: TlsFiles, names: tuple[str, ...] = (), now_s: float | None = None
) -> list[Finding]:
    """Those that are given. `names`: DNS names of which the certificate is to have one."""
    given = [path for path in (files.cert, files.key, files.ca) if path is not None]
    unreadable = [finding for path in given if (finding := _check_readable(path)) is not None]
    if unreadable:
        return unreadable
    if (files.cert is None) != (files.key is None):
        meaning = "a certificate is of no use without its key"
        return [wrong("TLS", f"only {given[0]}", meaning, "give --tls-cert and --tls-key")]
    if files.cert is None or files.key is None:
        return [ok("TLS", f"believes {files.ca}")] if files.ca else []
    now_s = time.time() if now_s is None else now_s
    pair = _check_pair(files.cert, files.key, files.ca, names, now_s)
    return [check_key_mode(files.key), *pair]


def check_key_mode(key: Path) -> Finding:
    """Whether others on this machine can read a private key."""
    status = key.stat()
    if is_readable_by_others(status):
        return wrong(
            f"key {key}",
            f"mode {status.st_mode & 0o7777:04o}",
            "others on this machine can read it, and be whoever it is of",
            f"chmod 600 {key}; if others could read it for long, make another",
        )
    return ok(f"key {key}", f"mode {status.st_mode & 0o7777:04o}")


def _check_readable(path: Path) -> Finding | None:
    try:
        path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        return wrong(f"file {path}", problem, _NO_TLS, "look at its path, owner and mode")
    return None


def _check_pair(
    cert: Path, key: Path, ca: Path | None, names: tuple[str, ...], now_s: float
) -> list[Finding]:
    name = f"certificate {cert}"
    try:
        certificate = read_certificate(cert, key)
    except (ssl.SSLError, OSError, ValueError) as error:
        problem = getattr(error, "reason", None) or str(error)
        remedy = "they have to be PEM, and the key that of the certificate"
        return [wrong(name, f"with {key}: {problem}", _NO_TLS, remedy)]
    findings = [_check_time(name, certificate, now_s)]
    shown = ", ".join(sorted(certificate.dns_names)) or "none"
    if names and certificate.dns_names.isdisjoint(names):
        needed = " or ".join(names)
        remedy = "make one with that name: splitserve certs"
        findings.append(
            wrong(name, f"has the DNS names: {shown}", f"needed is {needed}: it is refused", remedy)
        )
    else:
        findings.append(ok(name, f"has the DNS names: {shown}"))
    if ca is not None and (problem := refusal_of(cert, key, ca)):
        meaning = f"whoever believes {ca} does not believe it"
        remedy = "one of this authority, with its whole chain in the file"
        findings.append(wrong(name, problem, meaning, remedy))
    return findings


def _check_time(name: str, certificate: Certificate, now_s: float) -> Finding:
    begins_s, ends_s = certificate.begins_s, certificate.ends_s
    remedy = "renew it: running processes read the files again by themselves"
    ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    if ends_s <= now_s:
        return wrong(name, f"ended at {ends}", "everybody refuses it", remedy)
    if begins_s > now_s:
        meaning = "everybody refuses it until then, or this clock is wrong"
        begins = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begins_s))
        return wrong(name, f"begins at {begins}", meaning, "look at the clock of this machine")
    if ends_s - now_s < certificate.soon_s:
        return warning(name, f"ends at {ends}", "from then on everybody refuses it", remedy)
    return ok(name, f"ends at {ends}")
