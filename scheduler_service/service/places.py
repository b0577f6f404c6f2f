"""How much of something there may be side by side, for each of those that want it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitserve_rpc.domain_error import DomainError


class Places:
    """`most` places for each owner; nothing is remembered of one that has none."""

    def __init__(self, most: int, refusal: Callable[[str], DomainError]) -> None:
        """`refusal`: what an owner is told that has all of its places."""
        self._most = most
        self._refusal = refusal
        self._num_taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        """`owner` has one more within. Raises DomainError."""
        if self._num_taken[owner] >= self._most:
            raise self._refusal(owner)
        self._num_taken[owner] += 1
        try:
            yield
        finally:
            self._num_taken[owner] -= 1
            if not self._num_taken[owner]:
                del self._num_taken[owner]
