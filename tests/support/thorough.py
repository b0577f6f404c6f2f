"""Tests that `make test` leaves to `make test-all` say why."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def check_reasons(items: Iterable[pytest.Item]) -> None:
    """Raises UsageError for a thorough test that does not say why it is one."""
    for item in items:
        for mark in item.iter_markers("thorough"):
            is_said = len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()
            if not is_said or mark.kwargs:
                said = (mark.args, mark.kwargs)
                raise pytest.UsageError(f"{item.nodeid}: thorough needs one reason, has {said}")
