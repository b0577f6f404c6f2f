"""What can be asked, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from splitserve_bench.workloads.conversation import Turn
from splitserve_rpc.tls import TlsFiles


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


# -- What is asked of every target, beside lengths -------------------------------------------------

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class AskOptions:
    """`token_range`: prompts are made of these ids, the first and the one after the last.

    `ignores_eos`: answers are as long as they were wanted. `model`: None for the first that an
    OpenAI server lists. `counts_tokens`: asks for usage in every event, which not all servers know.
    `extra_body`: more fields of a body for OpenAI's API.
    """

    temperature: float = 0.0
    ignores_eos: bool = True
    token_range: tuple[int, int] = (10, 1000)
    endpoint: Endpoint = "completions"
    model: str | None = None
    counts_tokens: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetAddress:
    """Whom to ask, by which name in reports. `url`: grpc://host:port, or http(s)://host:port/v1."""

    name: str
    url: str
    api_key_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None


# -- Server-sent events out of the bytes of a response, as they come -------------------------------

_MOST_BYTES = 16 * 2**20


class EventLines:
    """Takes bytes, gives the data of the events that are complete with them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises AskFailed for a line without an end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise AskFailed("bad_answer", f"an event has more than {_MOST_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
