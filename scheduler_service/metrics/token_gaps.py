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
    """Requests whose last tokens came at the same time. `keys`: theirs, as bytes."""

    keys: bytes
    last_ns: int


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
        cohort = _Cohort(told, now_ns)
        firsts, is_whole = [], True
        for key, num_tokens in Counter(keys.tolist()).items():
            before = self._cohort_of.get(key)
            if before is not None:
                self._gaps.repeat((now_ns - before.last_ns) / num_tokens, num_tokens)
                self._whole.pop(before.keys, None)
            elif key in known:
                firsts.append(key)
            else:
                is_whole = False  # it ended before its token came
                continue
            self._cohort_of[key] = cohort
            is_whole = is_whole and num_tokens == 1
        if is_whole:
            self._whole[told] = cohort
        return firsts

    def ended(self, key: int) -> None:
        """It gets none any more."""
        cohort = self._cohort_of.pop(key, None)
        if cohort is not None:
            self._whole.pop(cohort.keys, None)

    @property
    def num_remembered(self) -> int:
        """Requests, and sets of them."""
        return len(self._cohort_of) + len(self._whole)
