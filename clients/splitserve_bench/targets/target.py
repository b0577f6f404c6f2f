"""Protocols of targets, dialogs and exchanges; parts of answers; options; event stream lines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from splitserve_bench.workloads import Turn
from splitserve_rpc import TlsFiles


class AskFailed(Exception):
    """Request without a complete answer.

    `kind`: label under which errors are counted; few values.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Tokens:
    """Arrival of tokens. `num_tokens`: None if the server does not count them."""

    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """End of an answer, with the server's counts; None where it reports nothing."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int | None = None


Part = Tokens | AnswerSummary


class Exchange(Protocol):
    """Prepared request that can be sent once."""

    def send(self) -> AsyncGenerator[Part, None]:
        """Sends the request; yields its parts, AnswerSummary last. Raises AskFailed."""
        ...


class Dialog(Protocol):
    """Conversation with its history, so that each turn continues from the previous one."""

    def prepare(self, turn: Turn) -> Exchange:
        """Returns the request for `turn`. Called before it is due, since this takes time."""
        ...


class Target(Protocol):
    """Server that answers requests."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def get_ready(self) -> str:
        """Learns the server's properties; returns the model's name. Raises AskFailed."""
        ...

    def begin(self, salt: int) -> Dialog:
        """Starts a dialog. Equal pieces are equal texts if `salt` is the same."""
        ...


# -- Options and addresses of targets --------------------------------------------------------------

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class AskOptions:
    """Options of requests to every target.

    `token_range`: prompts use ids from the first up to below the second. `ignores_eos`: answers
    have the wanted length. `model`: None for the first model that an OpenAI server lists.
    `counts_tokens`: asks for usage in every event, which not all servers support. `extra_body`:
    further body fields for OpenAI's API.
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
    """Name of a target in reports, and its address.

    `url`: grpc://host:port, or http(s)://host:port/v1.
    """

    name: str
    url: str
    api_key_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None


# -- Server-sent events from response bytes --------------------------------------------------------

_MOST_BYTES = 16 * 2**20


class EventLines:
    """Splits response bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of events completed by `data`. Raises AskFailed for an endless line."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise AskFailed("bad_answer", f"an event has more than {_MOST_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
