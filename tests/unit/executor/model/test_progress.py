from __future__ import annotations

import io

import pytest

from executor_service.model.loaded_model import show_progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _open_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_show_progress_yields_the_items_when_it_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _open_terminal(monkeypatch)
    assert list(show_progress([3, 1, 2], "weights", delay_s=0.0)) == [3, 1, 2]
    assert "weights: " in terminal.getvalue()
    assert "/3 " in terminal.getvalue()


def test_show_progress_is_gone_at_the_end_when_it_showed_a_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _open_terminal(monkeypatch)
    list(show_progress([1], "weights", delay_s=0.0))
    assert terminal.getvalue().endswith("\r")


def test_show_progress_shows_nothing_when_it_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _open_terminal(monkeypatch)
    assert list(show_progress([1, 2], "weights", delay_s=1e9)) == [1, 2]
    assert "weights" not in terminal.getvalue()


def test_show_progress_shows_nothing_when_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    assert list(show_progress([1, 2], "weights", delay_s=0.0)) == [1, 2]
    assert pipe.getvalue() == ""
