"""Registry of LoRA adapters: names, files and versions.

A request gets the version that its adapter's files have when it is accepted: a reference, the name
with the digest of the files. As long as unfinished requests have a version, its files are kept
open, so that executors can load it even after a folder was replaced or removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splitserve_adapters import (
    AdapterFiles,
    AdapterInvalid,
    check_adapter_name,
    read_adapters_file,
    reference_of,
)
from splitserve_contract import DomainError

_LOOKS_EVERY_S = 1.0
# Names of adapters that an error lists.
_MAX_SHOWN = 10

_log = logging.getLogger(__name__)


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
    """Files of an adapter as they were read. `files`: open while `num_requests` is not 0."""

    name: str
    path: Path
    digest: str
    num_bytes: int
    base_model: str
    files_version: object
    num_requests: int = 0
    files: AdapterFiles | None = None


@dataclass(slots=True)
class _Known:
    """A name, and the folder it stands for. `checked_s`: when the files were looked at last.

    `is_found`: the folder was found in the folder of adapters.
    """

    path: Path
    is_found: bool = False
    version: _Version | None = None
    checked_s: float = -_LOOKS_EVERY_S
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class AdapterRegistry:
    """Adapters by name: given at the start, from a watched file, from a folder, or by operators."""

    def __init__(
        self,
        adapters: Mapping[str, Path] | None = None,
        directory: Path | None = None,
        file: Path | None = None,
        now_s: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """`directory`: each folder in it is an adapter. `file`: lists more, and may change."""
        self._directory = directory
        self._file = file
        self._now_s = now_s
        self._known = {name: _Known(path) for name, path in (adapters or {}).items()}
        self._in_file: dict[str, Path] = {}
        self._file_error = ""
        # Versions that requests may have, by reference; those in use among them.
        self._versions: dict[str, _Version] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no name can be registered but by an operator, and none has been."""
        return not self._known and self._directory is None and self._file is None

    def names(self) -> list[str]:
        """Returns the registered names, in order; those of the folder are read from it."""
        return sorted({*self._known, *self._in_directory()})

    def list(self) -> list[RegisteredAdapter]:
        """Returns the registered adapters, in order of their names."""
        found = {name: self._shown(name, known) for name, known in self._known.items()}
        for name, path in self._in_directory().items():
            found.setdefault(name, RegisteredAdapter(name, path))
        return [found[name] for name in sorted(found)]

    # -- names of requests -------------------------------------------------------------------------

    async def look(self, name: str) -> None:
        """Reads the files of an adapter, if they were not read or have changed.

        To be called before `reference`, which reports errors.
        """
        known = self._find(name)
        if known is None or (known.version and self._now_s() - known.checked_s < _LOOKS_EVERY_S):
            return
        async with known.reading:
            try:
                await self._read(name, known)
            except AdapterInvalid as error:
                known.version = None
                _log.warning("adapter_unreadable name=%s reason=%r", name, str(error))
                if known.is_found and not known.path.is_dir():
                    self._known.pop(name, None)

    def reference(self, name: str) -> str:
        """Returns the name for rows of the version that an adapter has now.

        Raises AdapterUnknown, and DomainError(ADAPTER_INVALID) if its files cannot be read.
        """
        known = self._find(name)
        if known is None:
            raise AdapterUnknown(name, self.names())
        if known.version is None:
            try:
                with self._open(known):
                    pass
            except AdapterInvalid as error:
                raise _invalid(str(error)) from error
            raise _invalid(f"the files of adapter {name!r} changed while they were read")
        return reference_of(name, known.version.digest)

    def hold(self, reference: str) -> None:
        """Keeps the files of a version, for a request that was accepted with it."""
        version = self._versions.get(reference)
        if version is None:
            return
        if version.files is None:
            try:
                files = AdapterFiles.open(version.path, self._directory_of(version.path))
            except AdapterInvalid as error:
                raise _invalid(str(error)) from error
            if files.version != version.files_version:
                files.close()
                raise _invalid(f"the files of adapter {version.name!r} have just changed")
            version.files = files
        version.num_requests += 1

    def release(self, reference: str) -> None:
        """Ends one `hold`."""
        version = self._versions.get(reference)
        if version is None:
            return
        version.num_requests -= 1
        if version.num_requests == 0:
            assert version.files is not None, "held files are open"
            version.files.close()
            version.files = None
            known = self._known.get(version.name)
            if known is None or known.version is not version:
                self._forget_version(version)

    # -- for executors -----------------------------------------------------------------------------

    def source(self, reference: str) -> tuple[Path, str, int] | None:
        """Returns path, digest and size in bytes of a version; None if no request has it."""
        version = self._versions.get(reference)
        return None if version is None else (version.path, version.digest, version.num_bytes)

    def chunks(self, digest: str) -> Generator[tuple[str, bytes]]:
        """Returns a generator of (file name, next bytes) of a version that requests have.

        Raises AdapterUnknown.
        """
        for version in self._versions.values():
            if version.digest == digest and version.files is not None:
                # Own descriptors: the requests may end meanwhile.
                return _chunks(version.files.duplicate())
        raise AdapterUnknown(digest, [])

    # -- changes -----------------------------------------------------------------------------------

    async def load(self, name: str, path: Path, *, replace: bool) -> RegisteredAdapter:
        """Registers an adapter, and reads its files.

        Raises DomainError: ADAPTER_INVALID, ADAPTER_EXISTS.
        """
        path = await asyncio.to_thread(path.absolute)
        present = self._find(name)
        if present is not None and present.path != path and not replace:
            raise DomainError(
                "ADAPTER_EXISTS", f"adapter {name!r} is {present.path}; `replace` is not set"
            )
        try:
            check_adapter_name(name)
            known = _Known(path)
            await self._read(name, known)
        except AdapterInvalid as error:
            raise _invalid(str(error)) from error
        if present is not None:
            self._forget(name)
        self._known[name] = known
        _log.info("adapter_registered name=%s path=%s", name, path)
        return self._shown(name, known)

    def unload(self, name: str) -> None:
        """Removes an adapter; requests that have it keep it. Raises AdapterUnknown."""
        if name not in self._known:
            raise AdapterUnknown(name, self.names())
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
            listed = await asyncio.to_thread(read_adapters_file, self._file)
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

    def _find(self, name: str) -> _Known | None:
        known = self._known.get(name)
        if known is None and self._directory is not None and _is_folder_name(name):
            path = self._directory / name
            if path.is_dir():
                known = self._known[name] = _Known(path, is_found=True)
        return known

    def _in_directory(self) -> dict[str, Path]:
        if self._directory is None:
            return {}
        try:
            folders = (path for path in self._directory.iterdir() if path.is_dir())
            return {path.name: path for path in folders if _is_folder_name(path.name)}
        except OSError:
            return {}

    def _directory_of(self, path: Path) -> Path | None:
        """Returns the folder that the files of a request's choice must not leave."""
        is_inside = self._directory is not None and path.parent == self._directory
        return self._directory if is_inside else None

    def _open(self, known: _Known) -> AdapterFiles:
        return AdapterFiles.open(known.path, self._directory_of(known.path))

    async def _read(self, name: str, known: _Known) -> None:
        """Sets the version of an adapter. Raises AdapterInvalid."""
        before, inside = known.version, self._directory_of(known.path)
        now = await asyncio.to_thread(_examine, name, known.path, inside, before)
        known.checked_s = self._now_s()
        if now is before:
            return
        # The same files may be in use already.
        known.version = self._versions.setdefault(reference_of(name, now.digest), now)
        if before is not None:
            self._forget_version(before)

    def _forget_version(self, version: _Version) -> None:
        """Forgets a version that its name does not stand for any more, unless requests have it."""
        if version.num_requests == 0:
            self._versions.pop(reference_of(version.name, version.digest), None)

    def _forget(self, name: str) -> None:
        known = self._known.pop(name, None)
        if known is not None and known.version is not None:
            self._forget_version(known.version)

    @staticmethod
    def _shown(name: str, known: _Known) -> RegisteredAdapter:
        version = known.version
        if version is None:
            return RegisteredAdapter(name, known.path)
        return RegisteredAdapter(name, known.path, version.digest, version.base_model)


def _examine(name: str, path: Path, inside: Path | None, before: _Version | None) -> _Version:
    """Returns the version of the files at `path`; `before` if they have not changed since.

    Raises AdapterInvalid.
    """
    with AdapterFiles.open(path, inside) as files:
        found = files.version
        if before is not None and before.files_version == found:
            return before
        base_model = files.config().get("base_model_name_or_path")
        digest, num_bytes = files.digest(), files.num_bytes
        if files.version != found:
            raise AdapterInvalid(f"the files of adapter {name!r} changed while they were read")
    shown = base_model if isinstance(base_model, str) else ""
    return _Version(name, path, digest, num_bytes, shown, found)


def _chunks(files: AdapterFiles) -> Generator[tuple[str, bytes]]:
    with files:
        for name in files.names:
            yield from ((name, chunk) for chunk in files.chunks(name))


def _is_folder_name(name: str) -> bool:
    """Returns whether a request may name a folder right inside another one so."""
    try:
        check_adapter_name(name)
    except AdapterInvalid:
        return False
    return name not in (".", "..") and "/" not in name and "\\" not in name


def _invalid(message: str) -> DomainError:
    return DomainError("ADAPTER_INVALID", message)
