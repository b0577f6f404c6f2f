"""A few combinations of many options that still put every pair or triple of them together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

_Setting = tuple[str, object]


def covering(options: Mapping[str, Sequence[object]], strength: int) -> list[dict[str, object]]:
    """Cases in which every `strength` options take every combination of their values.

    Greedy, and the same for the same arguments: the next case is the one with most combinations
    that none had before.
    """
    missing = {
        combination
        for names in itertools.combinations(options, strength)
        for combination in itertools.product(*([(n, value) for value in options[n]] for n in names))
    }
    every = [
        tuple(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    cases = []
    while missing:
        best = max(every, key=lambda case: len(_combinations(case, strength) & missing))
        missing -= _combinations(best, strength)
        cases.append(dict(best))
    return cases


def _combinations(case: tuple[_Setting, ...], strength: int) -> set[tuple[_Setting, ...]]:
    return set(itertools.combinations(case, strength))
