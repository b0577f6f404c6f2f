from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve_rpc.access import Access
from splitserve_rpc.files import FilesUnusable
from splitserve_rpc.server import ServerSecurity, bind_server
from splitserve_rpc.tls import Tls
from tests.support.security.cluster import Certificates


def _serial_number(port: int, ca: Path) -> str:
    """Of the certificate that a new connection is met with."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        certificate = secured.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


async def test_new_connections_meet_the_certificate_that_is_there_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Certificates.make(tmp_path, "--client", "localhost")
    tls = Tls(made.files("scheduler", ca=False))
    running = bind_server("127.0.0.1:0", (), security=ServerSecurity(Access(), tls))
    await running.server.start()

    async def met() -> str:
        return await asyncio.to_thread(_serial_number, running.port, tmp_path / "ca.crt")

    first = await met()
    assert await met() == first
    Certificates.make(tmp_path)
    second = await met()
    assert second != first
    # The key has come, the certificate has not: what fits together is kept.
    shutil.copy(tmp_path / "localhost.key", tmp_path / "scheduler.key")
    with caplog.at_level(logging.WARNING):
        assert await met() == second
    assert "tls_files_unusable" in caplog.text
    shutil.copy(tmp_path / "localhost.crt", tmp_path / "scheduler.crt")
    assert await met() not in (first, second)
    (tmp_path / "scheduler.crt").unlink()
    assert await met() not in (first, second)
    await running.stop(0)


def _missing(directory: Path) -> None:
    (directory / "scheduler.crt").unlink()


def _empty(directory: Path) -> None:
    (directory / "scheduler.key").write_bytes(b"")


def _of_another(directory: Path) -> None:
    shutil.copy(directory / "operator.key", directory / "scheduler.key")


def _no_authority(directory: Path) -> None:
    (directory / "ca.crt").write_text("nothing")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_missing, "scheduler.crt: No such file"),
        (_empty, "scheduler.key"),
        (_of_another, "KEY_VALUES_MISMATCH"),
        (_no_authority, "ca.crt: contains no certificate"),
    ],
)
def test_files_are_refused_by_name_when_they_cannot_be_used(
    tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    files = Certificates.make(tmp_path).files("scheduler")
    spoil(tmp_path)
    with pytest.raises(FilesUnusable, match=named):
        Tls(files)


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    Certificates.make(tmp_path)
    modes = {path.name: os.stat(path).st_mode & 0o777 for path in tmp_path.iterdir()}
    assert {modes[name] for name in modes if name.endswith(".key")} == {0o600}
