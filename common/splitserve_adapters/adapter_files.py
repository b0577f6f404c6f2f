"""Files of one LoRA adapter: a PEFT folder, or a GGUF file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from splitserve_common import parse_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_ADAPTER_NAME = 128
_PICKLE_NAME = "adapter_model.bin"
_MAX_CONFIG_BYTES = 2**20
_MAX_WEIGHTS_BYTES = 16 * 2**30
_CHUNK_BYTES = 2**20
# Digits of the digest in the name for rows.
_SHORT_DIGEST = 16


class AdapterInvalid(Exception):
    """Error: files are no adapter, or none that is served. The text names file and field."""


class AdapterFiles:
    """Open files of an adapter.

    They stay what they are if their names get other files: only writing into a file changes it.
    """

    def __init__(self, path: Path, files: Mapping[str, int]) -> None:
        """`files`: open descriptor of each file by its name. Use `open`."""
        self.path = path
        self._files = dict(sorted(files.items()))

    @classmethod
    def open(cls, path: Path, inside: Path | None = None) -> Self:
        """Opens the adapter at `path`: a folder, or a GGUF file.

        `inside`: folder that no file may leave by a link. Raises AdapterInvalid.
        """
        opened: dict[str, int] = {}
        try:
            for file in _files_at(path):
                opened[file.name] = _open(file, inside)
        except BaseException:
            _close(opened.values())
            raise
        return cls(path, opened)

    def duplicate(self) -> Self:
        """Returns the same open files, to be closed on their own."""
        return type(self)(self.path, {name: os.dup(file) for name, file in self._files.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, in order."""
        return tuple(self._files)

    @property
    def num_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(os.fstat(file).st_size for file in self._files.values())

    @property
    def version(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, inode, size and time of change of each file: another file has another version."""
        found = ((name, os.fstat(file)) for name, file in self._files.items())
        return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in found)

    def digest(self) -> str:
        """Returns the digest of the files, which are read once."""
        return digest_of({name: _sha256(self.chunks(name)) for name in self._files})

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content of a file, at most 1 MiB at a time."""
        offset = 0
        while chunk := os.pread(self._files[name], _CHUNK_BYTES, offset):
            offset += len(chunk)
            yield chunk

    def read(self) -> dict[str, bytes]:
        """Returns the content of all files, by name."""
        return {name: b"".join(self.chunks(name)) for name in self._files}

    def config(self) -> dict[str, Any]:
        """Returns adapter_config.json; empty for a GGUF file. Raises AdapterInvalid."""
        if CONFIG_NAME not in self._files:
            return {}
        return read_config(b"".join(self.chunks(CONFIG_NAME)))

    def close(self) -> None:
        """Closes the files."""
        _close(self._files.values())
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_config(content: bytes) -> dict[str, Any]:
    """Returns the object in `content`, JSON. Raises AdapterInvalid."""
    try:
        config = parse_json(content)
    except ValueError as error:
        raise AdapterInvalid(f"{CONFIG_NAME} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterInvalid(f"{CONFIG_NAME} is no JSON object")
    return config


def digest_of(digests: Mapping[str, str]) -> str:
    """Returns the digest of files, given the SHA-256 of each by its name, both in hex."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return sha256(lines.encode()).hexdigest()


def reference_of(name: str, digest: str) -> str:
    """Returns the name for rows of an adapter with these files."""
    return f"{name}@{digest[:_SHORT_DIGEST]}"


def name_of(reference: str) -> str:
    """Returns the name that clients use: `reference` without the digest, if it has one."""
    return reference.rpartition("@")[0] or reference


def check_adapter_name(name: str) -> None:
    """Raises AdapterInvalid for a name that no adapter may have."""
    if not 1 <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable() or name.strip() != name:
        raise AdapterInvalid(
            f"the name {name[: 2 * MAX_ADAPTER_NAME]!r} is not allowed; allowed: 1 to"
            f" {MAX_ADAPTER_NAME} printable characters, spaces at neither end"
        )
    if "@" in name:
        raise AdapterInvalid(f"the name {name!r} has an @, which separates the digest")


def parse_adapters(entries: Iterable[str]) -> dict[str, Path]:
    """Returns the absolute paths of adapters by name, given as `NAME=DIR`.

    Raises AdapterInvalid for an entry of another form, a name that no adapter may have, and a name
    that is given twice. Reads no file.
    """
    adapters: dict[str, Path] = {}
    for entry in entries:
        name, separator, path = (part.strip() for part in entry.partition("="))
        if not separator or not path:
            raise AdapterInvalid(f"{entry.strip()!r} is invalid; allowed: NAME=DIR")
        check_adapter_name(name)
        if name in adapters:
            raise AdapterInvalid(f"the name {name!r} is given twice; allowed: once")
        # Executors get this path, too, and have another working directory.
        adapters[name] = Path(os.path.expanduser(path)).absolute()
    return adapters


def read_adapters_file(file: Path) -> dict[str, Path]:
    """Returns the adapters in a file of lines `NAME=DIR`, as `parse_adapters` does.

    Ignores empty lines and lines that begin with `#`. Raises AdapterInvalid.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterInvalid(f"{file} cannot be read: {error}") from error
    try:
        return parse_adapters(line for line in lines if line.strip() and line.lstrip()[0] != "#")
    except AdapterInvalid as error:
        raise AdapterInvalid(f"{file}: {error}") from error


def is_adapter_folder(path: Path) -> bool:
    """Returns whether a folder has an adapter_config.json."""
    return (path / CONFIG_NAME).exists()


def _files_at(path: Path) -> list[Path]:
    if path.suffix == ".gguf" and not path.is_dir():
        return [path]
    if not path.is_dir():
        raise AdapterInvalid(f"{path} is no folder")
    if not is_adapter_folder(path):
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found
        raise AdapterInvalid(f"{path} has no {CONFIG_NAME}, so it is no adapter")
    if not (path / WEIGHTS_NAME).exists():
        if (path / _PICKLE_NAME).exists():
            raise AdapterInvalid(
                f"{path} has {_PICKLE_NAME}, which can run any code when it is read; allowed:"
                f" {WEIGHTS_NAME}"
            )
        raise AdapterInvalid(f"{path} has no {WEIGHTS_NAME}")
    return [path / CONFIG_NAME, path / WEIGHTS_NAME]


def _open(file: Path, inside: Path | None) -> int:
    if inside is not None and not file.resolve().is_relative_to(inside.resolve()):
        raise AdapterInvalid(f"{file} is a link that leaves {inside}")
    try:
        # A pipe must not make the reader wait.
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterInvalid(f"{file} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(opened)
        limit = _MAX_CONFIG_BYTES if file.name == CONFIG_NAME else _MAX_WEIGHTS_BYTES
        if not stat.S_ISREG(found.st_mode):
            raise AdapterInvalid(f"{file} is no ordinary file")
        if found.st_size > limit:
            raise AdapterInvalid(f"{file} has {found.st_size} bytes; allowed: at most {limit}")
    except BaseException:
        os.close(opened)
        raise
    return opened


def _close(files: Any) -> None:  # noqa: ANN401
    for file in list(files):
        os.close(file)


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
