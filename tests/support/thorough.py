"""Tests, and cases of tests, that `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

_GOLDEN_RATIO = 0.6180339887


def leave_cases(items: Iterable[pytest.Item]) -> None:
    """Marks as thorough the cases of a test beyond the number that its mark `cases` has.

    Those that stay are drawn alike from all, whatever the order of parameters: not each n-th, which
    may always have the same value of one of them.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("cases")
        assert mark is not None
        (num,) = mark.args
        order = sorted(range(len(cases)), key=lambda number: number * _GOLDEN_RATIO % 1)
        for number in order[num:]:
            cases[number].add_marker(pytest.mark.thorough("others of its cases stay"))


def check_reasons(items: Iterable[pytest.Item]) -> None:
    """Raises UsageError for a thorough test that does not say why it is one."""
    for item in items:
        for mark in item.iter_markers("thorough"):
            is_said = len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0].strip()
            if not is_said or mark.kwargs:
                said = (mark.args, mark.kwargs)
                raise pytest.UsageError(f"{item.nodeid}: thorough needs one reason, has {said}")
