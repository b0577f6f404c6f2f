"""Ports that are taken for real."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from splitserve_cli.checks import ports
from splitserve_cli.checks.finding import State
from splitserve_cli.checks.ports import check_port, check_twice, owner_of


def test_port_is_free_until_somebody_listens_there_who_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = check_port("listen", f"127.0.0.1:{port}")
    free = check_port("listen", f"127.0.0.1:{port}")

    # It is this process; its command line may have our name in it.
    assert taken.state is not State.WRONG
    assert f"(process {os.getpid()})" in taken.found
    assert free.state is State.OK
    assert free.found == "free"


def test_address_of_another_machine_is_wrong() -> None:
    found = check_port("http", "192.0.2.1:8000")
    assert found.state is State.WRONG
    assert "--http" in found.remedy


def _process(proc: Path, inode: int, command: str) -> None:
    process = proc / "77"
    (process / "fd").mkdir(parents=True)
    (process / "fd" / "3").symlink_to(f"socket:[{inode}]")
    (process / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (process / "comm").write_text("python3\n")


def test_owner_of_a_port_is_named_without_its_arguments(tmp_path: Path) -> None:
    line = "0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1\n"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("header\n" + line)
    assert owner_of(8000 + 80, tmp_path) == "a process that is not shown to us"
    _process(tmp_path, 4711, "python3 other.py --password secret")

    assert owner_of(8080, tmp_path) == "python3 (process 77)"
    for program, name in (
        (b"splitserve_gateway", "splitserve gateway"),
        (b"scheduler_service", "splitserve scheduler"),
        (b"executor_service", "splitserve executor"),
        (b"splitserve_bench", "splitserve"),
    ):
        (tmp_path / "77" / "cmdline").write_bytes(b"python3\0-m\0" + program)
        assert owner_of(8080, tmp_path) == f"{name} (process 77)"


def test_port_of_ours_is_a_warning_unless_it_is_known_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "owner_of", lambda _port: "splitserve gateway (process 77)")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = check_port("http", address)
        running = check_port("http", address, is_running=True)
    assert (found.state, running.state) == (State.WARNING, State.OK)
    assert "one more does not start there" in found.meaning
    assert running.found == "taken by splitserve gateway (process 77)"


def test_address_that_two_options_name_is_wrong_but_for_those_that_may_be_one() -> None:
    assert list(check_twice([("listen", "a:1"), ("cluster-listen", "a:1"), ("http", "a:2")])) == []
    assert list(check_twice([("listen", "a:0"), ("http", "a:0")])) == []
    (found,) = check_twice([("listen", "a:1"), ("http", "a:1")])
    assert (found.name, found.found, found.state) == ("http a:1", "also --listen", State.WRONG)
