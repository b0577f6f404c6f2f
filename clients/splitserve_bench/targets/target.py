"""What can be asked, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from splitserve_bench.workloads.conversation import Turn


class AskFailed(Exception):
    """A request got no answer, or not all of one. `kind`: what is counted; a few there are."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Tokens:
    """Something came. `num_tokens`: None if that is not said."""

    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answered:
    """The end of an answer; counts are the server's, None where it says nothing."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int | None = None


Part = Tokens | Answered


class Exchange(Protocol):
    """A request that is ready to be sent, once."""

    def send(self) -> AsyncGenerator[Part, None]:
        """Sends it; the last part is Answered. Raises AskFailed."""
        ...


class Dialog(Protocol):
    """Remembers what was said, so that each turn goes on from there."""

    def prepare(self, turn: Turn) -> Exchange:
        """Makes the request, which takes its time, before it is due."""
        ...


class Target(Protocol):
    """Somebody who answers."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def get_ready(self) -> str:
        """Finds out what has to be known; returns the model's name. Raises AskFailed."""
        ...

    def begin(self, salt: int) -> Dialog:
        """A new dialog. Equal pieces are equal texts where the salt is the same."""
        ...
