"""Whether certificates, keys and authorities are of use."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from splitserve_cli.checks.finding import Finding, State, ok, warning, wrong
from splitserve_rpc.certificate import Certificate, read_certificate, refusal_of
from splitserve_rpc.secret_files import is_readable_by_others
from splitserve_rpc.tls import TlsFiles

_NO_TLS = "nobody can connect with it"
_RENEW = "renew it: running processes read the files again by themselves"
_CLOCK = "look at the clock of this machine"


def check_tls_files(
    files: TlsFiles,
    names: tuple[str, ...] = (),
    now_s: float | None = None,
    prefix: str = "tls",
    *,
    is_of_authority: bool = True,
) -> list[Finding]:
    """Those that are given. `names`: DNS names of which the certificate is to have one.

    `prefix`: of their options. `is_of_authority`: whether the authority is that of our own
    certificate, too, and not only of others'.
    """
    given = [path for path in (files.cert, files.key, files.ca) if path is not None]
    unreadable = [finding for path in given if (finding := check_readable(path)) is not None]
    if unreadable:
        return unreadable
    if (files.cert is None) != (files.key is None):
        meaning = "a certificate is of no use without its key"
        return [
            wrong("TLS", f"only {given[0]}", meaning, f"give --{prefix}-cert and --{prefix}-key")
        ]
    now_s = time.time() if now_s is None else now_s
    authority = [] if files.ca is None else check_authority(files.ca, now_s)
    if files.cert is None or files.key is None:
        return authority
    believer = files.ca if is_of_authority and _is_well(authority) else None
    pair = _check_pair(files.cert, files.key, believer, names, now_s)
    return [check_key_mode(files.key), *pair, *authority]


def check_authority(ca: Path, now_s: float) -> list[Finding]:
    """Whether others can be believed by it."""
    name = f"authority {ca}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError):
        remedy = "give the certificate of the authority, as PEM"
        return [wrong(name, "holds no certificate", "nobody is believed by it", remedy)]
    ends_s = [ssl.cert_time_to_seconds(str(said["notAfter"])) for said in context.get_ca_certs()]
    if not ends_s:
        return [ok(name, "holds no authority, but certificates that are believed themselves")]
    ended = [_date(each) for each in ends_s if each <= now_s]
    if len(ended) == len(ends_s):
        remedy = "make another, and certificates of it: splitserve certs; or " + _CLOCK
        return [wrong(name, f"ended at {max(ended)}", "nobody is believed by it", remedy)]
    return [ok(name, f"ends at {_date(max(ends_s))}")]


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


def check_readable(path: Path, meaning: str = _NO_TLS) -> Finding | None:
    """Whether we can; None if so."""
    try:
        path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        return wrong(f"file {path}", problem, meaning, "look at its path, owner and mode")
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
        remedy = "give that of this process, or make one with that name: splitserve certs"
        findings.append(
            wrong(name, f"has the DNS names: {shown}", f"needed is {needed}: it is refused", remedy)
        )
    else:
        findings.append(ok(name, f"has the DNS names: {shown}"))
    if ca is not None and (problem := refusal_of(cert, key, ca)):
        meaning = f"whoever believes {ca} does not believe it: another authority has signed it"
        remedy = "one of this authority, with its whole chain in the file"
        findings.append(wrong(name, problem, meaning, remedy))
    return findings


def _unusable(name: str, cert: Path, key: Path, problem: str) -> Finding:
    """Why both cannot be loaded, as far as it can be told."""
    if problem == "KEY_VALUES_MISMATCH":
        remedy = "give the key that the certificate was made for"
        return wrong(name, f"{key} is the key of another certificate", _NO_TLS, remedy)
    if not _has(cert, b"CERTIFICATE"):
        remedy = f"openssl x509 -inform DER -in {cert} -out NEW.crt, if it is one in another form"
        return wrong(name, "holds no certificate in PEM", _NO_TLS, remedy)
    if _has(key, b"ENCRYPTED"):
        meaning = "processes ask nobody for its passphrase: they do not start"
        remedy = f"openssl pkey -in {key} -out NEW.key, with mode 600"
        return wrong(f"key {key}", "has a passphrase", meaning, remedy)
    if not _has(key, b"PRIVATE KEY"):
        remedy = f"openssl pkey -inform DER -in {key} -out NEW.key, if it is one in another form"
        return wrong(f"key {key}", "holds no private key in PEM", _NO_TLS, remedy)
    remedy = "one of both is damaged: openssl x509 and openssl pkey say which; make both anew"
    return wrong(name, f"with {key}: {problem}", _NO_TLS, remedy)


def _has(path: Path, what: bytes) -> bool:
    """Whether a line that begins a part of a PEM file, or says how it is kept, names `what`."""
    marks = (b"-----BEGIN", b"Proc-Type:")
    return any(line.startswith(marks) and what in line for line in path.read_bytes().splitlines())


def _check_time(name: str, certificate: Certificate, now_s: float) -> Finding:
    begins_s, ends_s = certificate.begins_s, certificate.ends_s
    if ends_s <= now_s:
        return wrong(name, f"ended at {_date(ends_s)}", "everybody refuses it", _RENEW)
    if begins_s > now_s:
        meaning = "everybody refuses it until then, or this clock is wrong"
        return wrong(name, f"begins at {_date(begins_s)}", meaning, _CLOCK)
    if ends_s - now_s < certificate.soon_s:
        return warning(
            name, f"ends at {_date(ends_s)}", "from then on everybody refuses it", _RENEW
        )
    return ok(name, f"ends at {_date(ends_s)}")


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))
