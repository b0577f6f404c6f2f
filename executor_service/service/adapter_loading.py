"""LoadAdapter: gets the files of an adapter from a shared disk or the scheduler, and loads it.

The files are read once, and their digest is checked on what was read: files that change meanwhile
do no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from splitserve.executor.v1 import executor_pb2 as pb
from splitserve_adapters import AdapterFiles, AdapterInvalid, digest_of
from splitserve_common import check_file_name
from splitserve_contract import DomainError

_MAX_FILES = 8


class AdapterStore(Protocol):
    """Adapters in memory. One thread at a time may change it."""

    def has(self, name: str) -> bool:
        """Returns whether an adapter is loaded."""
        ...

    def keep(self, names: Collection[str]) -> None:
        """Removes all adapters but these."""
        ...

    def check_room(self, num_bytes: int) -> None:
        """Raises DomainError(ADAPTERS_FULL) if no adapter of this size can be loaded."""
        ...

    def load(self, name: str, files: Mapping[str, bytes]) -> None:
        """Loads an adapter from the contents of its files. Blocks. Raises AdapterInvalid."""
        ...


# Streams (file name, next bytes) of the adapter with a digest from the scheduler. Raises
# DomainError(ADAPTER_INVALID).
FetchAdapter = Callable[[str], AsyncIterator[tuple[str, bytes]]]


class AdapterLoading:
    """Loads adapters for schedulers, one at a time."""

    def __init__(self, store: AdapterStore, fetch: FetchAdapter) -> None:
        self._store = store
        self._fetch = fetch
        self._lock = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def load(self, source: pb.AdapterSource, kept: Collection[str]) -> None:
        """Returns when the adapter is loaded, and all others but `kept` are removed.

        Raises DomainError: ADAPTER_INVALID, ADAPTERS_FULL. A call that is cancelled does not end
        the loading.
        """
        task = self._tasks.get(source.name)
        if task is None:
            task = asyncio.create_task(self._load(source, kept))
            self._tasks[source.name] = task
            task.add_done_callback(lambda _task: self._tasks.pop(source.name, None))
        await asyncio.shield(task)

    async def _load(self, source: pb.AdapterSource, kept: Collection[str]) -> None:
        async with self._lock:
            self._store.keep({*kept, source.name})
            if self._store.has(source.name):
                return
            self._store.check_room(source.num_bytes)
            files = await asyncio.to_thread(_read_from_disk, source)
            if files is None:
                files = await self._fetch_files(source)
            try:
                await asyncio.to_thread(self._store.load, source.name, files)
            except AdapterInvalid as error:
                raise DomainError("ADAPTER_INVALID", str(error)) from error

    async def _fetch_files(self, source: pb.AdapterSource) -> dict[str, bytes]:
        """Returns the files that the scheduler sends. Raises DomainError(ADAPTER_INVALID)."""
        files: dict[str, bytearray] = {}
        num_bytes = 0
        async for name, data in self._fetch(source.digest):
            if "/" in name or name not in files:
                _check_name(name)
            files.setdefault(name, bytearray()).extend(data)
            num_bytes += len(data)
            if num_bytes > source.num_bytes or len(files) > _MAX_FILES:
                message = f"the scheduler sends more than {source.num_bytes} bytes or {_MAX_FILES}"
                raise DomainError("ADAPTER_INVALID", f"{message} files")
        found = {name: bytes(data) for name, data in files.items()}
        if await asyncio.to_thread(_digest, found) != source.digest:
            raise DomainError("ADAPTER_INVALID", "the files that the scheduler sent have changed")
        return found


def _check_name(name: str) -> None:
    try:
        check_file_name(name)
    except ValueError as error:
        raise DomainError("ADAPTER_INVALID", str(error)) from error
    if "/" in name:
        raise DomainError("ADAPTER_INVALID", f"the file name {name!r} has a path")


def _read_from_disk(source: pb.AdapterSource) -> dict[str, bytes] | None:
    """Returns the files at the source's path; None if this disk has none with its digest."""
    try:
        with AdapterFiles.open(Path(source.path)) as opened:
            if opened.num_bytes != source.num_bytes:
                return None
            files = opened.read()
    except (AdapterInvalid, OSError, ValueError):
        return None
    return files if _digest(files) == source.digest else None


def _digest(files: Mapping[str, bytes]) -> str:
    return digest_of({name: sha256(data).hexdigest() for name, data in files.items()})
