"""Which schedulers there are: a list, what a DNS name stands for, or the lines of a file.

`host:port,host:port`; `dns:host:port` for all addresses of that name; `file:path` for one address a
line. Whoever looks twice may be told something else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from splitserve_rpc.addresses import is_address
from splitserve_rpc.watched_files import FilesUnusable, WatchedFiles, read_bytes

# More are a mistake, and everybody connects to all of them.
MAX_SCHEDULERS = 64
_MAX_FILE_BYTES = 64 * 1024
_DNS, _FILE = "dns:", "file:"
# A name server is not asked more often, nor waited for longer.
_FRESH_S = 5.0
_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class Discovery(Protocol):
    """Tells which schedulers there are."""

    @property
    def host(self) -> str | None:
        """The name that all of them share, which their certificates have; None without one."""

    async def addresses(self) -> tuple[str, ...]:
        """`host:port` of each, at least one. Raises OSError if nothing was ever known."""
        ...


class Listed:
    """Those that were given."""

    host: str | None = None

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises ValueError."""
        self._addresses = _checked(addresses)

    async def addresses(self) -> tuple[str, ...]:
        return self._addresses


class InFile:
    """The lines of a file, read again when it changes. Empty lines and those after `#` are none."""

    host: str | None = None

    def __init__(self, path: Path) -> None:
        """Raises FilesUnusable."""
        self._watched = WatchedFiles("schedulers_file", [path], lambda: _read(path))

    async def addresses(self) -> tuple[str, ...]:
        return await asyncio.to_thread(self._watched.current)


class Named:
    """All addresses of a DNS name. What it said last holds while it says nothing."""

    def __init__(
        self,
        name: str,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: `host:port`."""
        self.host, _, port = name.rpartition(":")
        self._port = int(port)
        self._look_up = look_up or _look_up
        self._clock = clock
        self._known: tuple[str, ...] = ()
        self._problem = ""
        self._asked_at_s: float | None = None
        self._asking: asyncio.Task[tuple[str, ...]] | None = None

    async def addresses(self) -> tuple[str, ...]:
        now_s = self._clock()
        if self._asked_at_s is None or now_s - self._asked_at_s >= _FRESH_S or not self._known:
            self._asked_at_s = now_s
            await self._ask()
        return self._known

    async def _ask(self) -> None:
        """One question at a time: a name server that says nothing would take all threads."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._answer())
            # Perhaps nobody waits any more when it fails.
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        try:
            self._known = await asyncio.wait_for(asyncio.shield(self._asking), _TIMEOUT_S)
            self._problem = ""
        except (OSError, ValueError) as error:  # TimeoutError is one, too
            self._note(str(error) or f"no answer within {_TIMEOUT_S:g} s")
            if not self._known:
                raise OSError(f"{_DNS}{self.host}: {self._problem}") from error

    async def _answer(self) -> tuple[str, ...]:
        try:
            found = await self._look_up(self.host, self._port)
            return _checked(sorted(_joined(address, self._port) for address in found))
        finally:
            self._asking = None

    def _note(self, problem: str) -> None:
        """Logs it, but not each time that somebody looks."""
        if problem != self._problem:
            self._problem = problem
            _log.warning("schedulers_not_resolved host=%s problem=%r", self.host, problem)


def discovery(schedulers: str) -> Discovery:
    """What `schedulers` says; see the module. Raises ValueError, and FilesUnusable for a file."""
    if (path := _after(_FILE, schedulers)) is not None:
        try:
            return InFile(Path(path))
        except FilesUnusable as error:
            raise FilesUnusable(f"{_FILE}{error}") from error
    if (name := _after(_DNS, schedulers)) is not None:
        return Named(_checked([name])[0])
    return Listed(schedulers.split(","))


def names_several(address: str) -> bool:
    """Whether it has to be looked at here; what else there is, gRPC understands."""
    is_of_form = _after(_FILE, address) is not None or _after(_DNS, address) is not None
    return "," in address or (is_of_form and not address.startswith(_DNS + "/"))


def check_schedulers(schedulers: str) -> None:
    """Raises ValueError if it is of no form that there is; looks at no file."""
    path = _after(_FILE, schedulers)
    if path is None:
        discovery(schedulers)
    elif not path.strip():
        raise ValueError(f"{schedulers!r} is not allowed; it takes a path after {_FILE}")


def _after(form: str, schedulers: str) -> str | None:
    """What follows `dns:` or `file:`; None if it is not of that form (a host may have the name)."""
    is_of_form = schedulers.startswith(form) and not is_address(schedulers)
    return schedulers.removeprefix(form) if is_of_form else None


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    """Each once. Raises ValueError."""
    unusable = [address for address in addresses if not is_address(address)]
    if unusable:
        raise ValueError(f"{unusable[0]!r} is not allowed; it takes host:port")
    known = tuple(dict.fromkeys(addresses))
    if not 1 <= len(known) <= MAX_SCHEDULERS:
        raise ValueError(f"{len(known)} schedulers; allowed: 1 to {MAX_SCHEDULERS}")
    return known


def _read(path: Path) -> tuple[str, ...]:
    """Raises FilesUnusable."""
    with suppress(OSError):  # `read_bytes` says it
        if (num_bytes := path.stat().st_size) > _MAX_FILE_BYTES:
            raise FilesUnusable(f"{path}: has {num_bytes} bytes; allowed: {_MAX_FILE_BYTES}")
    text = read_bytes(path).decode(errors="replace")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    try:
        return _checked([line for line in lines if line])
    except ValueError as error:
        raise FilesUnusable(f"{path}: {error}") from error


async def _look_up(host: str, port: int) -> list[str]:
    """In a thread that nobody waits for.

    Those of the loop are waited for at its end, and a name server may take a minute to say nothing.
    """
    loop = asyncio.get_running_loop()
    looking: asyncio.Future[list[str]] = loop.create_future()

    def work() -> None:
        found: list[str] | BaseException
        try:
            found = _resolve(host, port)
        except BaseException as error:
            found = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_settle, looking, found)

    threading.Thread(target=work, name="look-up", daemon=True).start()
    return await looking


def _settle(looking: asyncio.Future[list[str]], found: list[str] | BaseException) -> None:
    if looking.done():
        return
    if isinstance(found, BaseException):
        looking.set_exception(found)
    else:
        looking.set_result(found)


def _resolve(host: str, port: int) -> list[str]:
    """Raises OSError."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is too long
        raise OSError(f"{error}") from error
    return [str(target[0]) for *_, target in found]


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
