"""Why a server cannot be reached: whether somebody listens, with TLS, and is believed."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from splitserve_cli.checks.finding import Finding, ok, wrong

TIMEOUT_S = 5.0
_TLS = "TLS of {}"


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    tls_name: str


async def check_connection(
    address: str, ca: Path | None, *, wants_tls: bool, tls_name: str | None = None
) -> list[Finding]:
    """`address`: `host:port`. `wants_tls`: whether we would speak TLS.

    `ca`: whom we believe, None: as this machine; `tls_name`: whom we expect, None: the host.
    """
    host, _, port = address.rpartition(":")
    host, name = host.strip("[]"), f"connection to {address}"
    server = _Server(host, int(port), tls_name or host)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _connect(server, None)
    except TimeoutError:
        meaning = "a firewall drops what comes, or the machine is gone"
        return [wrong(name, "no answer", meaning, "look at both from that machine and from this")]
    except (OSError, UnicodeError) as error:  # the latter for a label that is too long
        problem = getattr(error, "strerror", None) or str(error)
        meaning = "nobody listens there, or the name is wrong"
        remedy = "is it started, and does its --listen let others in? docs/security.md"
        return [wrong(name, problem, meaning, remedy)]
    findings = [ok(name, "somebody listens")]
    has_tls = await _speaks_tls(server)
    if has_tls != wants_tls:
        findings.append(_other_than_expected(address, has_tls=has_tls))
    elif has_tls and (problem := await _mistrust(server, ca)):
        remedy = "give --tls-ca with its authority, and the address by a name that it has"
        findings.append(wrong(_TLS.format(address), problem, "it is not believed", remedy))
    return findings


def _other_than_expected(address: str, *, has_tls: bool) -> Finding:
    name = _TLS.format(address)
    if has_tls:
        meaning = "we would speak plain text, which it does not understand"
        return wrong(name, "it speaks TLS", meaning, "give --tls-ca (a gateway: https://)")
    meaning = "we would speak TLS, which it does not understand"
    remedy = "start it with --tls-cert and --tls-key; or leave --tls-ca away on a network you trust"
    return wrong(name, "it speaks plain text", meaning, remedy)


async def _connect(server: _Server, context: ssl.SSLContext | None) -> None:
    name = None if context is None else server.tls_name
    _, writer = await asyncio.open_connection(
        server.host, server.port, ssl=context, server_hostname=name
    )
    writer.close()
    with suppress(OSError):  # it is of no interest any more
        await writer.wait_closed()


async def _speaks_tls(server: _Server) -> bool:
    context = _context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _connect(server, context)
    except (OSError, TimeoutError):
        return False
    return True


async def _mistrust(server: _Server, ca: Path | None) -> str:
    """Why its certificate is not believed; empty if it is."""
    context = _context()
    try:
        if ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca)
        async with asyncio.timeout(TIMEOUT_S):
            await _connect(server, context)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
    return ""


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
