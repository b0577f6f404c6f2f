"""Whether a grammar compiles: asked of processes beside this one, which may be killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from splitserve_client.types import Choices, Grammar, JsonSchema, Lark, Regex
from splitserve_gateway.grammars.requested import Gbnf, GrammarRefused, Source, checked_text

_WORKER = Path(__file__).with_name("check_worker.py")
_MAX_REPLY_BYTES = 1 << 20
# How a worker ends that was given more than it may use: out of processor time, out of memory, out
# of stack. The grammar is to blame.
_TOO_LARGE = {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL}


class GrammarCheckUnavailable(Exception):
    """Grammars cannot be checked now; nothing is known about this one."""


@dataclass(frozen=True, slots=True)
class CheckerLimits:
    """What checking may cost. Seconds, counts, bytes.

    `max_cpu_s`, `max_memory_mib`: of one worker. `max_wall_s`: also where the machine is busy.
    """

    num_workers: int = 2
    max_waiting: int = 256
    max_cpu_s: float = 1.0
    max_memory_mib: int = 1024
    max_wall_s: float = 20.0
    max_cached: int = 1024
    max_cached_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class _Verdict:
    error: str = ""
    lark: str = ""  # of a grammar in another dialect


class GrammarChecker:
    """Checks grammars, each content once.

    Not seen here: whether the model's tokens can spell what a grammar wants, whether special tokens
    that it names exist, and how many states it grows while an answer is made. An executor that
    finds such a thing fails that request.
    """

    def __init__(self, limits: CheckerLimits | None = None) -> None:
        """Starts nothing: workers come as they are needed."""
        self._limits = limits or CheckerLimits()
        self._cache: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._cached_bytes = 0
        self._checking: dict[bytes, asyncio.Task[_Verdict]] = {}
        self._free_workers = asyncio.Semaphore(self._limits.num_workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._is_closed = False

    async def check(self, field: str, source: Source) -> Grammar:
        """`source`, in a dialect of the contract, if it compiles.

        Raises GrammarRefused with what the compiler says, and GrammarCheckUnavailable.
        """
        kind, text = _kind_and_text(source)
        checked_text(field, text)
        if isinstance(source, Choices):
            return source  # texts: there is nothing to compile
        verdict = await self._verdict(kind, text)
        if verdict.error:
            raise GrammarRefused(field, verdict.error)
        if not isinstance(source, Gbnf):
            return source
        return Lark(checked_text(field, verdict.lark))

    async def close(self) -> None:
        """Ends the workers, and what they are at."""
        self._is_closed = True
        for worker in [*self._idle, *self._busy]:
            await worker.kill()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)

    async def _verdict(self, kind: str, text: str) -> _Verdict:
        request = json.dumps([kind, text]).encode()
        key = hashlib.sha256(request).digest()
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        task = self._checking.get(key)
        if task is None:
            if len(self._checking) >= self._limits.max_waiting:
                raise GrammarCheckUnavailable("too many grammars wait to be checked")
            task = asyncio.create_task(self._check(key, request))
            self._checking[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # It is not the first one's alone, and its verdict is worth keeping.
        return await asyncio.shield(task)

    def _forget(self, key: bytes, done: asyncio.Task[_Verdict]) -> None:
        self._checking.pop(key, None)
        done.exception()  # perhaps nobody waits for it any more

    async def _check(self, key: bytes, request: bytes) -> _Verdict:
        async with self._free_workers:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._limits)
            self._busy.add(worker)
            verdict = None
            try:
                if self._is_closed:
                    raise GrammarCheckUnavailable("grammars are no longer checked")
                async with asyncio.timeout(self._limits.max_wall_s):
                    verdict = await worker.ask(request)
            except TimeoutError as error:
                raise GrammarCheckUnavailable("the grammar was not checked in time") from error
            finally:
                self._busy.discard(worker)
                if verdict is None:
                    await worker.kill()
                else:
                    self._idle.append(worker)
        if verdict is None:
            verdict = _verdict_on_exit(worker)
        self._keep(key, verdict)
        return verdict

    def _keep(self, key: bytes, verdict: _Verdict) -> None:
        self._cache[key] = verdict
        self._cached_bytes += _size(verdict)
        while (
            len(self._cache) > self._limits.max_cached
            or self._cached_bytes > self._limits.max_cached_bytes
        ):
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class _Worker:
    """A process that compiles grammars, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, limits: CheckerLimits) -> _Worker:
        try:
            return cls(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    str(_WORKER),
                    str(limits.max_cpu_s),
                    str(limits.max_memory_mib),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    limit=_MAX_REPLY_BYTES,
                )
            )
        except OSError as error:
            raise GrammarCheckUnavailable(f"no process to check grammars: {error}") from error

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def ask(self, request: bytes) -> _Verdict | None:
        """The verdict; None if the process ended over it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(ConnectionError):
            stdin.write(request + b"\n")
            await stdin.drain()
        reply = await stdout.readline()
        if not reply.endswith(b"\n"):
            await self._process.wait()
            return None
        error, lark = json.loads(reply)
        return _Verdict(error, lark)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def _verdict_on_exit(worker: _Worker) -> _Verdict:
    if worker.exit_code in _TOO_LARGE:
        return _Verdict("takes too much time or memory to compile")
    raise GrammarCheckUnavailable(f"the process that checks grammars ended: {worker.exit_code}")


def _kind_and_text(source: Source) -> tuple[str, str]:
    match source:
        case JsonSchema(text):
            return "json_schema", text
        case Regex(text):
            return "regex", text
        case Lark(text):
            return "lark", text
        case Gbnf(text):
            return "gbnf", text
        case Choices(texts):
            return "choices", "".join(texts)


def _size(verdict: _Verdict) -> int:
    return 200 + 4 * len(verdict.error) + 4 * len(verdict.lark)
