"""The time between tokens of requests, whose rows mostly come together in step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve_metrics.bulk_histogram import BulkValues


@dataclass(slots=True)
class _Cohort:
    """Requests whose last tokens came at the same time.

    `keys`: theirs, as bytes; `members`: those of them that have had none since, and have not ended.
    """

    keys: bytes
    last_ns: int
    members: set[int]


class TokenGaps:
    """While the same requests get a token each, all gaps are one, whatever their number."""

    def __init__(self, gaps: BulkValues) -> None:
        """`gaps`: in nanoseconds."""
        self._gaps = gaps
        self._cohort_of: dict[int, _Cohort] = {}
        # Those of whom nobody has had a token since with others, or ended.
        self._whole: dict[bytes, _Cohort] = {}

    def add(self, keys: npt.NDArray[np.int64], now_ns: int, known: Container[int]) -> list[int]:
        """A token for each of `keys`, of which some may be there several times.

        Returns the `known` ones that had none before. Of what comes with a first one nothing is
        told; several share the time since the last one.
        """
        told = keys.tobytes()
        cohort = self._whole.get(told)
        if cohort is not None:
            self._gaps.repeat(now_ns - cohort.last_ns, len(keys))
            cohort.last_ns = now_ns
            return []
        counts = Counter(keys.tolist())
        has_each_once = len(counts) == len(keys)
        if has_each_once:
            self._add_together(set(counts), now_ns)
        else:
            self._add_one_by_one(counts, now_ns)
        new = [key for key in counts if key not in self._cohort_of]
        firsts = [key for key in new if key in known]
        # The others ended before their tokens came.
        cohort = _Cohort(told, now_ns, set(counts).difference(new).union(firsts))
        self._cohort_of.update(dict.fromkeys(cohort.members, cohort))
        if has_each_once and len(firsts) == len(new):
            self._whole[told] = cohort
        return firsts

    def _add_together(self, keys: set[int], now_ns: int) -> None:
        """Mostly they are one cohort, but for a few: sets are compared, and not keys."""
        while keys:
            before = self._cohort_of.get(next(iter(keys)))
            if before is None:
                keys.pop()
                continue
            common = keys & before.members
            self._gaps.repeat(now_ns - before.last_ns, len(common))
            self._leave(before, common)
            keys -= common

    def _add_one_by_one(self, counts: Counter[int], now_ns: int) -> None:
        for key, num_tokens in counts.items():
            before = self._cohort_of.get(key)
            if before is not None:
                self._gaps.repeat((now_ns - before.last_ns) / num_tokens, num_tokens)
                self._leave(before, {key})

    def _leave(self, cohort: _Cohort, keys: set[int]) -> None:
        cohort.members -= keys
        self._whole.pop(cohort.keys, None)

    def ended(self, key: int) -> None:
        """It gets none any more."""
        cohort = self._cohort_of.pop(key, None)
        if cohort is not None:
            self._leave(cohort, {key})

    @property
    def num_remembered(self) -> int:
        """Requests, and sets of them."""
        return len(self._cohort_of) + len(self._whole)
