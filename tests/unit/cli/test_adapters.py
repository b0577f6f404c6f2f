"""`splitserve adapters`, and adapters in `splitserve info`."""

from __future__ import annotations

import json

import pytest

from splitserve_cli.main import main
from tests.support.fakes.running_schedulers import FakeServer


def run(server: FakeServer, *arguments: str) -> int:
    return main([*arguments, "--address", server.address])


def test_adapters_are_listed_as_a_table(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "adapters", "list") == 0
    assert capsys.readouterr().out == "no adapters\n"

    server.fake.adapters = {"a": "/adapters/a", "formal": "/adapters/\x1b[2J"}
    assert run(server, "adapters", "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "ADAPTER  DIGEST        TRAINED FOR  PATH",
        "a        61            base         /adapters/a",
        r"formal   666f726d616c  base         /adapters/\x1b[2J",
    ]

    assert run(server, "adapters", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["adapters"]
    assert listed[0] == {"name": "a", "path": "/adapters/a", "digest": "61", "base_model": "base"}


def test_adapter_is_loaded_replaced_and_removed(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "adapters", "load", "formal", "/adapters/formal") == 0
    assert run(server, "adapters", "load", "formal", "/adapters/other") == 1
    assert run(server, "adapters", "load", "formal", "/adapters/other", "--replace") == 0
    assert server.fake.adapters == {"formal": "/adapters/other"}
    assert run(server, "adapters", "unload", "formal") == 0
    assert run(server, "adapters", "unload", "formal") == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "formal is loaded from /adapters/formal",
        "formal is loaded from /adapters/other",
        "formal is removed",
    ]
    assert [line.rpartition(" ")[2] for line in shown.err.splitlines()] == [
        "[ADAPTER_EXISTS]",
        "[ADAPTER_UNKNOWN]",
    ]


def test_info_names_some_adapters_when_there_are_many(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "info") == 0
    assert "adapters" not in capsys.readouterr().out

    server.fake.adapters = {f"a{number}": "/a" for number in range(9)}
    assert run(server, "info") == 0
    assert "adapters: a0, a1, a2, a3, a4, a5, a6, a7, 1 more\n" in capsys.readouterr().out

    assert run(server, "info", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["adapters"]) == 9


def test_generate_names_its_adapter(server: FakeServer) -> None:
    arguments = ("generate", "--adapter", "formal", "--max-tokens", "1", "t3")
    assert run(server, *arguments) == 0
    assert [request.adapter for request in server.fake.requests] == ["formal"]
