"""Registry of LoRA adapters: names, files and versions.

A request gets the version that its adapter's files have when it is accepted: a reference, the name
with the digest of the files. As long as unfinished requests have a version, its files are kept
open, so that executors can load it even after a folder was replaced or removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from splitserve_adapters import (
    AdapterFiles,
    AdapterInvalid,
    check_adapter_name,
    read_adapters_file,
    reference_of,
)
from splitserve_contract import DomainError

_MAX_READERS = 4
# Names of adapters that an error lists.
_MAX_SHOWN = 10

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


async def _load_later(_reference: str) -> None:
    """Leaves an adapter to the first request that names it."""


class AdapterUnknown(DomainError):
    """Error: no adapter of this name is registered. The message lists those that are."""

    def __init__(self, name: str, known: list[str]) -> None:
        shown = ", ".join(known[:_MAX_SHOWN]) or "none"
        more = f" and {len(known) - _MAX_SHOWN} more" if len(known) > _MAX_SHOWN else ""
        super().__init__("ADAPTER_UNKNOWN", f"no adapter {name!r}; registered: {shown}{more}")


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """A registered adapter. `digest`: empty before a request has named the adapter."""

    name: str
    path: Path
    digest: str = ""
    base_model: str = ""


@dataclass(slots=True)
class _Version:
    """Files of an adapter as they were read. `files`: open while `num_users` is not 0."""

    name: str
    path: Path
    digest: str
    num_bytes: int
    base_model: str
    files_version: object
    num_users: int = 0
    files: AdapterFiles | None = None


@dataclass(slots=True)
class _Known:
    """A name, and the folder it stands for.

    `is_found`: the folder was found in the folder of adapters. `version`: None if the files could
    not be read, for the reason `why_not`.
    """

    path: Path
    is_found: bool = False
    version: _Version | None = None
    why_not: str = ""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class AdapterRegistry:
    """Adapters by name: given at the start, from a watched file, from a folder, or by operators.

    Files are read in threads of its own: a disk that hangs costs requests with adapters alone.
    """

    def __init__(
        self,
        adapters: Mapping[str, Path] | None = None,
        directory: Path | None = None,
        file: Path | None = None,
    ) -> None:
        """`directory`: each folder in it is an adapter. `file`: lists more, and may change."""
        self._directory = directory
        self._file = file
        self._threads = ThreadPoolExecutor(_MAX_READERS, "adapter-files")
        self._known = {name: _Known(path) for name, path in (adapters or {}).items()}
        self._in_directory: dict[str, Path] = {}
        self._in_file: dict[str, Path] = {}
        self._file_error = ""
        # Versions that requests may have, by reference.
        self._versions: dict[str, _Version] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no adapter is registered, and no file or folder is configured to bring one."""
        return not self._known and self._directory is None and self._file is None

    async def listed(self) -> list[RegisteredAdapter]:
        """Returns the registered adapters, in order of their names."""
        self._in_directory = await self._run(self._read_directory)
        return [self._shown(name) for name in self._names()]

    # -- names of requests -------------------------------------------------------------------------

    @asynccontextmanager
    async def looking(self, name: str) -> AsyncIterator[None]:
        """Reads the files of an adapter, if they were not read or have changed.

        In the block, `reference` returns the version that they have now, or raises why there is
        none.
        """
        version = await self._look(name)
        if version is None:
            yield
            return
        try:
            yield
        finally:
            self._release(version)

    def reference(self, name: str) -> str:
        """Returns the name for rows of the version that an adapter has; see `looking`.

        Raises AdapterUnknown, and DomainError(ADAPTER_INVALID) if its files cannot be read.
        """
        known = self._known.get(name)
        if known is None:
            raise AdapterUnknown(name, self._names())
        if known.version is None:
            raise _invalid(known.why_not)
        return reference_of(name, known.version.digest)

    def hold(self, reference: str) -> None:
        """Keeps the files of a version for a request; to be called in `looking`."""
        version = self._versions.get(reference)
        if version is not None:
            version.num_users += 1

    def release(self, reference: str) -> None:
        """Ends one `hold`."""
        version = self._versions.get(reference)
        if version is not None:
            self._release(version)

    async def _look(self, name: str) -> _Version | None:
        """Returns the version that an adapter has now, in use by the caller; None without one."""
        known = self._known.get(name)
        if known is None:
            if await self._run(self._find, name) is None:
                self._in_directory = await self._run(self._read_directory)
                return None
            assert self._directory is not None
            known = self._known.setdefault(name, _Known(self._directory / name, is_found=True))
        async with known.reading:
            try:
                version = await self._read(name, known)
            except AdapterInvalid as error:
                _log.warning("adapter_unreadable name=%s reason=%r", name, str(error))
                before, known.version, known.why_not = known.version, None, str(error)
                if before is not None:
                    self._forget_version(before)
                if known.is_found and await self._run(self._find, name) is None:
                    self._known.pop(name, None)
                return None
        return version

    def _release(self, version: _Version) -> None:
        version.num_users -= 1
        if version.num_users:
            return
        assert version.files is not None, "files in use are open"
        version.files.close()
        version.files = None
        known = self._known.get(version.name)
        if known is None or known.version is not version:
            self._versions.pop(reference_of(version.name, version.digest), None)

    # -- for executors -----------------------------------------------------------------------------

    def source(self, reference: str) -> tuple[Path, str, int] | None:
        """Returns path, digest and size in bytes of a version; None if no request has it."""
        version = self._versions.get(reference)
        if version is None or version.num_users == 0:
            return None
        return version.path, version.digest, version.num_bytes

    async def chunks(self, digest: str) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yields (file name, next bytes) of a version that requests have. Raises AdapterUnknown."""
        for version in self._versions.values():
            if version.digest == digest and version.files is not None:
                # Own descriptors: the requests may end meanwhile.
                files = version.files.duplicate()
                break
        else:
            raise AdapterUnknown(digest, [])
        with files:
            for name in files.names:
                chunks = files.chunks(name)
                while (chunk := await self._run(next, chunks, None)) is not None:
                    yield name, chunk

    # -- changes -----------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        path: Path,
        *,
        replace: bool,
        load_ahead: Callable[[str], Awaitable[None]] = _load_later,
    ) -> RegisteredAdapter:
        """Registers an adapter, after its files were read.

        `load_ahead`: has an executor load a version. Raises DomainError: ADAPTER_INVALID,
        ADAPTER_EXISTS, and what `load_ahead` raises; then nothing has changed.
        """
        path = await self._run(path.absolute)
        present = self._known.get(name)
        if present is not None and present.path != path and not replace:
            raise DomainError(
                "ADAPTER_EXISTS", f"adapter {name!r} is {present.path}; `replace` is not set"
            )
        known = _Known(path)
        try:
            check_adapter_name(name)
            version = await self._read(name, known)
        except AdapterInvalid as error:
            raise _invalid(str(error)) from error
        try:
            await load_ahead(reference_of(name, version.digest))
            self._forget(name)
            self._known[name] = known
        finally:
            self._release(version)
        _log.info("adapter_registered name=%s path=%s", name, path)
        return self._shown(name)

    def unload(self, name: str) -> None:
        """Removes an adapter; requests that have it keep it. Raises AdapterUnknown."""
        if name not in self._known:
            raise AdapterUnknown(name, self._names())
        self._forget(name)
        _log.info("adapter_removed name=%s", name)

    async def keep_fresh(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Reads the file of adapters again whenever it changes, until cancelled."""
        while self._file is not None:
            await self.read_file()
            await pause()

    async def read_file(self) -> None:
        """Takes over what the file of adapters lists. An unusable file changes nothing."""
        if self._file is None:
            return
        try:
            listed = await self._run(read_adapters_file, self._file)
        except AdapterInvalid as error:
            if self._file_error != str(error):
                self._file_error = str(error)
                _log.warning("adapters_file_unusable reason=%r", self._file_error)
            return
        self._file_error = ""
        if listed == self._in_file:
            return
        for name in self._in_file.keys() - listed.keys():
            self._forget(name)
        for name, path in listed.items():
            present = self._known.get(name)
            if present is not None and present.path != path:
                self._forget(name)
            if self._known.get(name) is None:
                self._known[name] = _Known(path)
        self._in_file = listed
        _log.info("adapters_file_read file=%s num_adapters=%d", self._file, len(listed))

    # -- files -------------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def _find(self, name: str) -> Path | None:
        """Returns the folder of a name in the folder of adapters."""
        if self._directory is None or not _is_folder_name(name):
            return None
        path = self._directory / name
        return path if path.is_dir() else None

    def _read_directory(self) -> dict[str, Path]:
        if self._directory is None:
            return {}
        try:
            folders = [path for path in self._directory.iterdir() if path.is_dir()]
        except OSError:
            return {}
        return {path.name: path for path in folders if _is_folder_name(path.name)}

    async def _read(self, name: str, known: _Known) -> _Version:
        """Sets the version of an adapter, and returns it, in use. Raises AdapterInvalid."""
        before = known.version
        is_inside = known.path.parent == self._directory
        inside = self._directory if is_inside else None
        files, now = await self._run(_examine, name, known.path, inside, before)
        # Other files may have the same contents, and be in use already.
        version = self._versions.setdefault(reference_of(name, now.digest), now)
        version.path, version.files_version = now.path, now.files_version
        if version.files is None:
            version.files = files
        else:
            files.close()
        version.num_users += 1
        known.version = version
        if before is not None and before is not version:
            self._forget_version(before)
        return version

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is not None and known.version is not None:
            self._forget_version(known.version)

    def _forget_version(self, version: _Version) -> None:
        """Forgets a version that its name does not stand for any more, unless requests have it."""
        if version.num_users == 0:
            self._versions.pop(reference_of(version.name, version.digest), None)

    def _names(self) -> list[str]:
        return sorted({*self._known, *self._in_directory})

    def _shown(self, name: str) -> RegisteredAdapter:
        known = self._known.get(name)
        if known is None:
            return RegisteredAdapter(name, self._in_directory[name])
        if known.version is None:
            return RegisteredAdapter(name, known.path)
        return RegisteredAdapter(name, known.path, known.version.digest, known.version.base_model)


def _examine(
    name: str, path: Path, inside: Path | None, before: _Version | None
) -> tuple[AdapterFiles, _Version]:
    """Returns the open files at `path` and their version: `before` if they have not changed since.

    Raises AdapterInvalid.
    """
    files = AdapterFiles.open(path, inside)
    try:
        found = files.version
        if before is not None and before.files_version == found:
            return files, before
        base_model = files.config().get("base_model_name_or_path")
        digest, num_bytes = files.digest(), files.num_bytes
        if files.version != found:
            raise AdapterInvalid(f"the files of adapter {name!r} changed while they were read")
    except BaseException:
        files.close()
        raise
    shown = base_model if isinstance(base_model, str) else ""
    return files, _Version(name, path, digest, num_bytes, shown, found)


def _is_folder_name(name: str) -> bool:
    """Returns whether a request may name a folder right inside another one so."""
    try:
        check_adapter_name(name)
    except AdapterInvalid:
        return False
    return name not in (".", "..") and "/" not in name and "\\" not in name


def _invalid(message: str) -> DomainError:
    return DomainError("ADAPTER_INVALID", message)
