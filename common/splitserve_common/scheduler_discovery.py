"""Discovery of schedulers: from a list, a DNS name, or a file.

`host:port,host:port`: a list. `dns:host:port`: all addresses of that name. `file:path`: one address
per line. Later look-ups may return other addresses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from splitserve_common.addresses import is_address
from splitserve_common.files import FilesUnusable, WatchedFiles, read_bytes

# A larger number is a mistake: each client connects to all schedulers.
MAX_SCHEDULERS = 64
_MAX_FILE_BYTES = 64 * 1024
_DNS, _FILE = "dns:", "file:"
# Minimum time between two queries after an answer, and maximum time to wait for the first answer.
_FRESH_S = 5.0
_TIMEOUT_S = 5.0
# A resolver whose packet was lost is silent for 5 s or more. A caller with an earlier answer waits
# for _PATIENCE_S only, and another query starts after _AGAIN_S.
_PATIENCE_S = 0.5
_AGAIN_S = 2.0
_MAX_QUERIES = 4
_NO_ANSWER = "the name server does not answer"

_log = logging.getLogger(__name__)

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery(Protocol):
    """Source of the addresses of schedulers."""

    @property
    def host(self) -> str | None:
        """Host name shared by all schedulers, as in their certificates; None if there is none."""

    async def addresses(self) -> tuple[str, ...]:
        """Returns at least one `host:port`. Raises OSError if no address was ever known."""
        ...


class StaticDiscovery:
    """Discovery from a fixed list of addresses."""

    host: str | None = None

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: each `host:port`. Raises ValueError."""
        self._addresses = _checked(addresses)

    async def addresses(self) -> tuple[str, ...]:
        return self._addresses


class FileDiscovery:
    """Discovery from a file with one address per line, read again when it changes.

    Empty lines and text after `#` are ignored.
    """

    host: str | None = None

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises FilesUnusable."""
        self._watched = WatchedFiles("schedulers_file", [path], lambda: _read(path))

    async def addresses(self) -> tuple[str, ...]:
        return await asyncio.to_thread(self._watched.current)


class DnsDiscovery:
    """Discovery of all addresses of a DNS name.

    The last answer is used while the resolver is silent.
    """

    def __init__(
        self,
        name: str,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`name`: `host:port`.

        `patience_s`: time to wait for an answer if an earlier one is known.
        """
        self.host, _, port = name.rpartition(":")
        self._port = int(port)
        self._look_up = look_up or _look_up
        self._clock = clock
        self._patience_s = patience_s
        self._known: tuple[str, ...] = ()
        self._problem = ""
        self._queried_at_s = -math.inf
        self._num_queries = self._last_answered = 0
        # Open queries by number. Each is a thread, and may take a minute.
        self._queries: dict[int, asyncio.Task[None]] = {}

    async def addresses(self) -> tuple[str, ...]:
        new_queries = [self._query()] if self._is_due() else []
        if self._known:
            # A later answer is used by the next call.
            await _is_answered(new_queries, self._patience_s)
            return self._known
        if not await _is_answered(self._queries.values(), _TIMEOUT_S):
            self._note(_NO_ANSWER)
        if not self._known:
            raise OSError(f"{_DNS}{self.host}: {self._problem}")
        return self._known

    @property
    def _is_waited_for(self) -> bool:
        """Whether the latest query is open. Answers to earlier queries are outdated."""
        return self._num_queries in self._queries

    def _is_due(self) -> bool:
        if len(self._queries) >= _MAX_QUERIES:
            return False
        age_s = self._clock() - self._queried_at_s
        if self._is_waited_for:
            return age_s >= _AGAIN_S
        return age_s >= _FRESH_S or not self._known

    def _query(self) -> asyncio.Task[None]:
        if self._is_waited_for:
            self._note(_NO_ANSWER)
        self._queried_at_s = self._clock()
        self._num_queries += 1
        query = asyncio.create_task(self._answer(self._num_queries))
        self._queries[self._num_queries] = query
        return query

    async def _answer(self, number: int) -> None:
        known, problem = self._known, ""
        try:
            found = await self._look_up(self.host, self._port)
            known = _checked(sorted(_joined(address, self._port) for address in found))
        except (OSError, ValueError) as error:
            problem = str(error)
        finally:
            del self._queries[number]
        # An earlier query may be answered after a later one.
        if number < self._last_answered:
            return
        if problem:
            self._note(problem)
            return
        self._last_answered, self._known = number, known
        # Only the answer to the latest query clears the problem, so a slow server is logged once.
        if number == self._num_queries:
            self._problem = ""

    def _note(self, problem: str) -> None:
        """Logs a problem unless it repeats the last logged one."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("schedulers_not_resolved host=%s problem=%r", self.host, problem)


def discovery(schedulers: str) -> Discovery:
    """Returns the discovery that `schedulers` describes, in a form of the module docstring.

    Raises ValueError, and FilesUnusable for a file.
    """
    if (path := _after(_FILE, schedulers)) is not None:
        try:
            return FileDiscovery(Path(path))
        except FilesUnusable as error:
            raise FilesUnusable(f"{_FILE}{error}") from error
    if (name := _after(_DNS, schedulers)) is not None:
        return DnsDiscovery(_checked([name])[0])
    return StaticDiscovery(schedulers.split(","))


def names_several(address: str) -> bool:
    """Returns whether `address` needs discovery here; gRPC understands all other addresses."""
    is_of_form = _after(_FILE, address) is not None or _after(_DNS, address) is not None
    return "," in address or (is_of_form and not address.startswith(_DNS + "/"))


def check_schedulers(schedulers: str) -> None:
    """Raises ValueError if `schedulers` has no valid form. Reads no file."""
    path = _after(_FILE, schedulers)
    if path is None:
        discovery(schedulers)
    elif not path.strip():
        raise ValueError(f"{schedulers!r} is invalid; allowed: {_FILE}PATH")


async def _is_answered(queries: Collection[asyncio.Task[None]], timeout_s: float) -> bool:
    """Waits for the first answer to open queries. Returns whether one came within `timeout_s`."""
    if not queries:
        return False
    first = asyncio.FIRST_COMPLETED
    done, _ = await asyncio.wait(queries, timeout=timeout_s, return_when=first)
    return bool(done)


def _after(form: str, schedulers: str) -> str | None:
    """Returns the text after the prefix `form`; None without the prefix.

    `dns:50051` and `file:50051` are hosts with a port, not prefixes.
    """
    is_of_form = schedulers.startswith(form) and not is_address(schedulers)
    return schedulers.removeprefix(form) if is_of_form else None


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct addresses.

    Raises ValueError for a bad address or number of addresses.
    """
    unusable = [address for address in addresses if not is_address(address)]
    if unusable:
        raise ValueError(f"{unusable[0]!r} is invalid; allowed: host:port")
    known = tuple(dict.fromkeys(addresses))
    if not 1 <= len(known) <= MAX_SCHEDULERS:
        raise ValueError(f"{len(known)} schedulers; allowed: 1 to {MAX_SCHEDULERS}")
    return known


def _read(path: Path) -> tuple[str, ...]:
    """Returns the addresses in a file. Raises FilesUnusable."""
    with suppress(OSError):  # `read_bytes` reports it
        if (num_bytes := path.stat().st_size) > _MAX_FILE_BYTES:
            raise FilesUnusable(f"{path}: has {num_bytes} bytes; allowed: {_MAX_FILE_BYTES}")
    text = read_bytes(path).decode(errors="replace")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    try:
        return _checked([line for line in lines if line])
    except ValueError as error:
        raise FilesUnusable(f"{path}: {error}") from error


async def _look_up(host: str, port: int) -> list[str]:
    """Resolves a name in a daemon thread. Raises OSError.

    The event loop waits for its own threads when it ends, and a name server may take a minute to
    fail.
    """
    loop = asyncio.get_running_loop()
    resolving: asyncio.Future[list[str]] = loop.create_future()

    def work() -> None:
        found: list[str] | BaseException
        try:
            found = _resolve(host, port)
        except BaseException as error:
            found = error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_settle, resolving, found)

    try:
        threading.Thread(target=work, name="look-up", daemon=True).start()
    except RuntimeError as error:  # too many threads
        raise OSError(f"{error}") from error
    return await resolving


def _settle(resolving: asyncio.Future[list[str]], found: list[str] | BaseException) -> None:
    if resolving.done():
        return
    if isinstance(found, BaseException):
        resolving.set_exception(found)
    else:
        resolving.set_result(found)


def _resolve(host: str, port: int) -> list[str]:
    """Returns the IP addresses of `host`. Raises OSError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # the name has a label that is too long
        raise OSError(f"{error}") from error
    return [str(target[0]) for *_, target in found]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
