"""How many calls that last one tenant may have open, whatever comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from scheduler_service.service.places import Places
from splitserve_rpc.domain_error import DomainError

# A gateway has one for all of its requests.
MAX_OPEN_STREAMS = 1024
# Each holds a piece of a file, until the caller reads it; those that wait hold nothing.
MAX_TOKENIZERS_AT_ONCE = 8
MAX_TOKENIZERS = 256
_RETRY_DELAY_S = 1.0


class OpenCalls:
    """Counts Generate and Session streams, and GetTokenizer calls, of each owner."""

    def __init__(self) -> None:
        self._streams = Places(MAX_OPEN_STREAMS, _too_many_streams)
        self._tokenizers = Places(MAX_TOKENIZERS, _too_many_tokenizers)
        # Kept by those that wait or have a turn.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def stream(self, tenant: str | None) -> Iterator[None]:
        """One is open within; None: nobody knows whose. Raises DomainError(QUOTA_EXCEEDED)."""
        if tenant is None:
            yield
            return
        with self._streams.taken(tenant):
            yield

    @asynccontextmanager
    async def tokenizer(self, owner: str) -> AsyncIterator[None]:
        """Waits for a turn: those that start together all get theirs.

        Raises DomainError(QUOTA_EXCEEDED).
        """
        with self._tokenizers.taken(owner):
            turns = self._turns.get(owner)
            if turns is None:
                turns = self._turns[owner] = asyncio.Semaphore(MAX_TOKENIZERS_AT_ONCE)
            async with turns:
                yield


def _too_many_streams(tenant: str) -> DomainError:
    message = (
        f"tenant {tenant!r} has {MAX_OPEN_STREAMS} Generate and Session streams open, as many as "
        "it may"
    )
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)


def _too_many_tokenizers(owner: str) -> DomainError:
    message = f"{owner} has {MAX_TOKENIZERS} GetTokenizer calls open, as many as it may"
    return DomainError("QUOTA_EXCEEDED", message, retry_delay_s=_RETRY_DELAY_S)
