"""Checks of a connection: whether a server listens, uses TLS, and has a trusted certificate."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from splitserve_cli.checks.finding import Finding, ok, wrong
from splitserve_rpc import TlsFiles

TIMEOUT_S = 5.0
# A server that requires a client certificate closes the connection immediately; other servers may
# wait for the client to speak.
_CLOSES_WITHIN_S = 0.5
_TLS = "TLS of {}"
_OTHER_AUTHORITY = "give --tls-ca with the authority that signed its certificate"
_OTHER_NAME = (
    "use a host name of its certificate, or issue one with this name: splitserve certs --host"
)
# By OpenSSL's error numbers, X509_V_ERR_...
_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        9: "check the clocks of both machines: by this one it is not valid yet",
        10: "renew it there; running processes reload the files",
        62: _OTHER_NAME,
        64: _OTHER_NAME,
    }
)


@dataclass(frozen=True, slots=True)
class _Server:
    host: str
    port: int
    tls_name: str


@dataclass(frozen=True, slots=True)
class TlsWords:
    """Instructions for enabling TLS of a server and its clients, used in remedies."""

    server: str = "start it with --tls-cert and --tls-key"
    with_tls: str = "give --tls-ca"
    without: str = "omit --tls-ca on a trusted network"


async def check_connection(
    address: str,
    files: TlsFiles,
    *,
    uses_tls: bool,
    tls_name: str | None = None,
    words: TlsWords | None = None,
) -> list[Finding]:
    """Checks the connection to `address` (`host:port`).

    `uses_tls`: whether the client would use TLS. `files`: trusted authorities, by default those of
    this machine, and the client's own certificate, if any. `tls_name`: expected name of the server;
    None for the host.
    """
    host, _, port = address.rpartition(":")
    host, name = host.strip("[]"), f"connection to {address}"
    server = _Server(host, int(port), tls_name or host)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _connect(server, None)
    except TimeoutError:
        meaning = "a firewall drops the packets, or the machine is down"
        return [wrong(name, "no answer", meaning, "check both machines and the network")]
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the host name is too long
        number = getattr(error, "errno", None) or 0
        problem = (
            os.strerror(number) if number > 0 else getattr(error, "strerror", "") or str(error)
        )
        meaning = "no process listens there, or the name is wrong"
        remedy = (
            "check that it runs, and that --listen accepts remote connections: docs/security.md"
        )
        return [wrong(name, problem, meaning, remedy)]
    findings = [ok(name, "a server listens")]
    has_tls = await _speaks_tls(server)
    if has_tls != uses_tls:
        found = _other_than_expected(address, words or TlsWords(), has_tls=has_tls)
        findings.append(found)
    elif has_tls and (problem := await _problem_of_tls(server, files, address)) is not None:
        findings.append(problem)
    return findings


def _other_than_expected(address: str, words: TlsWords, *, has_tls: bool) -> Finding:
    name = _TLS.format(address)
    if has_tls:
        meaning = "this client is set to plain text, which the server does not accept"
        return wrong(name, "the server uses TLS", meaning, words.with_tls)
    meaning = "this client is set to TLS, which the server does not accept"
    return wrong(name, "the server uses plain text", meaning, f"{words.server}; or {words.without}")


async def _connect(server: _Server, context: ssl.SSLContext | None) -> None:
    name = None if context is None else server.tls_name
    _, writer = await asyncio.open_connection(
        server.host, server.port, ssl=context, server_hostname=name
    )
    writer.close()
    with suppress(OSError):  # the result of closing does not matter
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


async def _problem_of_tls(server: _Server, files: TlsFiles, address: str) -> Finding | None:
    """Returns why the server's certificate is not trusted, or ours not accepted.

    None if all is well.
    """
    name = _TLS.format(address)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            is_closed = await _is_closed(server, _context_of(files))
    except ssl.SSLCertVerificationError as error:
        remedy = _REMEDIES.get(error.verify_code, _OTHER_AUTHORITY)
        return wrong(name, error.verify_message, "its certificate is not trusted", remedy)
    except (OSError, TimeoutError) as error:
        problem = str(error) or type(error).__name__
        return wrong(name, problem, "the TLS handshake fails", _OTHER_AUTHORITY)
    if not is_closed:
        return None
    if files.cert is None:
        meaning = "the server requires a client certificate"
        return wrong(
            name, "the server closes the connection", meaning, "give --tls-cert and --tls-key"
        )
    meaning = "it most likely rejects the client certificate: not signed by its authority"
    remedy = "give --tls-cert and --tls-key issued by the authority of that cluster"
    return wrong(name, "the server closes the connection", meaning, remedy)


async def _is_closed(server: _Server, context: ssl.SSLContext) -> bool:
    """Returns whether the server closes the connection after the TLS handshake."""
    reader, writer = await asyncio.open_connection(
        server.host, server.port, ssl=context, server_hostname=server.tls_name
    )
    try:
        async with asyncio.timeout(_CLOSES_WITHIN_S):
            return not await reader.read(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        # Skips the closing handshake of TLS, which some servers do not answer.
        writer.transport.abort()


def _context_of(files: TlsFiles) -> ssl.SSLContext:
    context = _context()
    if files.ca is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(files.ca)
    if files.cert is not None and files.key is not None:
        context.load_cert_chain(files.cert, files.key, password="")
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context
