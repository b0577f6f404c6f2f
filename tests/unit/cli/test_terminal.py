"""Control characters in generated text are escaped on terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
from contextlib import redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_cli.command_line import as_seen_by_people
from splitserve_cli.main import main
from tests.support.fakes.fake_scheduler import expected_tokens
from tests.support.fakes.running_schedulers import FakeServer

# Clears the screen, and sets the title of the window by 8-bit controls.
HOSTILE = "\x1b[2J\x9d0;mine\x07\r\x7f"
SHOWN = r"\x1b[2J\x9d0;mine\x07\r\x7f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text())
def test_no_control_reaches_a_terminal_and_all_else_does(text: str) -> None:
    terminal = Terminal()
    as_seen_by_people(terminal).write(text)
    shown = terminal.getvalue()
    allowed = {"\n", "\t"}
    assert all(ord(char) not in (*range(32), *range(127, 160)) for char in set(shown) - allowed)
    if not any(ord(char) in (*range(32), *range(127, 160)) for char in set(text) - allowed):
        assert shown == text


@pytest.fixture
def hostile(server: FakeServer) -> FakeServer:
    """Its model writes what speaks to terminals, first of all."""
    first = expected_tokens([1, 9], 1, 1)[0]
    tokenizer = json.loads(server.fake.tokenizer_files["tokenizer.json"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[HOSTILE] = vocabulary.pop(f"t{first}")
    server.fake.tokenizer_files["tokenizer.json"] = json.dumps(tokenizer).encode()
    return server


@pytest.mark.parametrize("more", [[], ["--n=2"]])
def test_generate_escapes_controls_on_a_terminal(hostile: FakeServer, more: list[str]) -> None:
    ours, theirs = pty.openpty()
    with (
        os.fdopen(theirs, "w", encoding="utf-8", newline="") as terminal,
        redirect_stdout(terminal),
    ):
        argv = ["generate", "--address", hostile.address, "--seed=1", "--max-tokens=2", *more]
        assert main([*argv, "t1"]) == 0
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert SHOWN.encode() in shown
    assert b"\x1b" not in shown


@pytest.mark.parametrize("more", [[], ["--n=2"]])
def test_generate_keeps_controls_in_a_pipe(
    hostile: FakeServer, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not sys.stdout.isatty()
    argv = ["generate", "--address", hostile.address, "--seed=1", "--max-tokens=2", *more]
    assert main([*argv, "t1"]) == 0
    assert HOSTILE in capsys.readouterr().out


def _read(descriptor: int) -> bytes:
    """Nothing at the end, which is an error where nobody has the other side any more."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""
