"""Limits on open calls, of each tenant and of each owner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from splitserve_contract import DomainError

# Of one tenant. A gateway needs one Session for all of its requests.
MAX_OPEN_STREAMS = 1024
# GetTokenizer calls of one owner. A call that sends holds a chunk of a file until the caller reads
# it; a call that waits for its turn holds nothing.
MAX_TOKENIZERS_AT_ONCE = 8
MAX_TOKENIZERS = 256
_RETRY_DELAY_S = 1.0


class OpenCalls:
    """Limits each tenant's Generate and Session streams, and each owner's GetTokenizer calls."""

    def __init__(self) -> None:
        self._streams = PerOwnerLimit(MAX_OPEN_STREAMS, _too_many_streams)
        self._tokenizers = PerOwnerLimit(MAX_TOKENIZERS, _too_many_tokenizers)
        # Semaphores are kept alive by the calls that wait for them or hold them.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def stream(self, tenant: str | None) -> Iterator[None]:
        """Counts an open stream of `tenant` within the block. Raises DomainError(QUOTA_EXCEEDED).

        `tenant` None: the tenant is unknown, and the stream is not counted.
        """
        if tenant is None:
            yield
            return
        with self._streams.taken(tenant):
            yield

    @asynccontextmanager
    async def tokenizer(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn of `owner` to send a tokenizer, and holds the turn within the block.

        Raises DomainError(QUOTA_EXCEEDED) if MAX_TOKENIZERS calls of `owner` are open.
        """
        with self._tokenizers.taken(owner):
            turns = self._turns.get(owner)
            if turns is None:
                turns = self._turns[owner] = asyncio.Semaphore(MAX_TOKENIZERS_AT_ONCE)
            async with turns:
                yield


def _too_many_streams(tenant: str) -> DomainError:
    message = (
        f"tenant {tenant!r} has {MAX_OPEN_STREAMS} open Generate and Session streams, the maximum"
    )
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)


def _too_many_tokenizers(owner: str) -> DomainError:
    message = f"{owner} has {MAX_TOKENIZERS} open GetTokenizer calls, the maximum"
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)


# -- Concurrency limit of each owner ---------------------------------------------------------------


class PerOwnerLimit:
    """Counter that gives each owner at most `most` places; owners without places cost no memory."""

    def __init__(self, most: int, refusal: Callable[[str], DomainError]) -> None:
        """`refusal` makes the error for an owner whose places are all taken."""
        self._most = most
        self._refusal = refusal
        self._num_taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        """Takes a place of `owner` for the block. Raises the DomainError of `refusal`."""
        if self._num_taken[owner] >= self._most:
            raise self._refusal(owner)
        self._num_taken[owner] += 1
        try:
            yield
        finally:
            self._num_taken[owner] -= 1
            if not self._num_taken[owner]:
                del self._num_taken[owner]
