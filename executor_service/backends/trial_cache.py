"""Files that remember which models passed their trials, so that a later start need not repeat them.

A file is named after everything that a trial depends on: the model's files, our code and the
packages it calls, the processor, and the options. If any of these differs there is no such file. A
file begins with the SHA-256 of the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import splitserve_kernels
from splitserve_common import parse_json
from splitserve_kernels.cpu.build import BuildFailed, cache_directory

# A directory for these files, or OFF. `splitserve_options` knows the name, too.
TRIALS_VARIABLE = "SPLITSERVE_TRIAL_CACHE"
OFF = "off"

# A file holds a tokenizer, which is most of it. The oldest go.
_MAX_FILES = 32
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
# Source of the executor and of the kernels.
_ROOTS = (Path(__file__).parents[1], *map(Path, splitserve_kernels.__path__))
_SOURCES = (".py", ".cpp", ".h")
_CPUINFO = Path("/proc/cpuinfo")
# Lines of /proc/cpuinfo that do not change while the machine runs.
_CPU_LINES = ("vendor_id", "model name", "cpu family", "model", "stepping", "microcode", "flags")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*/*.jinja")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrialCache:
    """Remembered facts of models, one file for each key. Several processes may share it."""

    directory: Path

    def read(self, key: str) -> dict[str, Any] | None:
        """Reads the facts of the model with this key; None if it was not remembered.

        A damaged file is logged at WARNING and not used.
        """
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("trials_not_read file=%s reason=%r", path.name, str(error))
            return None
        digest, _, body = content.partition(b"\n")
        if digest != _sha256(body).encode():
            _log.warning("trials_not_read file=%s reason=%r", path.name, "it is damaged")
            return None
        facts = parse_json(body)
        assert isinstance(facts, dict), "facts were written as an object"
        return facts

    def write(self, key: str, facts: dict[str, Any]) -> None:
        """Stores `facts`, which JSON can hold, under `key`. Logs at WARNING if that fails."""
        body = json.dumps(facts).encode()
        path = self._path(key)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
                written = Path(scratch) / path.name
                written.write_bytes(_sha256(body).encode() + b"\n" + body)
                written.replace(path)
            files = [(each.stat().st_mtime_ns, each) for each in self.directory.glob("*.json")]
            for _, oldest in sorted(files)[:-_MAX_FILES]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("trials_not_remembered reason=%r", str(error))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def open_trial_cache() -> TrialCache | None:
    """Returns the cache that TRIALS_VARIABLE names, else one beside the compiled kernels.

    Returns None if the variable is OFF, or if there is no directory for caches.
    """
    named = os.environ.get(TRIALS_VARIABLE)
    if named == OFF:
        return None
    if named:
        return TrialCache(Path(named))
    try:
        return TrialCache(cache_directory() / "trials")
    except BuildFailed:
        return None


def trial_key(directory: Path, weight_files: Iterable[Path], digest: str, options: object) -> str:
    """Returns the key of a model: a hex SHA-256.

    `digest`: of the model's files, which need not see every byte: sizes and times of
    `weight_files`, and all of the small files in `directory`, count as well. `options`: whatever
    else decides what is tried; its `repr` counts.
    """
    small = {path for pattern in _SMALL_FILES for path in directory.glob(pattern)}
    files = [(path.name, _sha256(path.read_bytes())) for path in sorted(small)]
    weights = [
        (path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in weight_files
    ]
    parts = (digest, str(directory), files, weights, options, code_digest(), cpu_digest())
    return _sha256(repr(parts).encode())


@cache
def code_digest(roots: tuple[Path, ...] = _ROOTS) -> str:
    """Returns the digest of the source below `roots`, and of the versions of packages it calls.

    It is computed once in a process.
    """
    sha256 = hashlib.sha256()
    for root in roots:
        for path in sorted(each for each in root.rglob("*") if each.suffix in _SOURCES):
            sha256.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    versions = [(name, metadata.version(name)) for name in _PACKAGES]
    sha256.update(repr((versions, platform.python_version())).encode())
    return sha256.hexdigest()


def cpu_digest(cpuinfo: Path = _CPUINFO) -> str:
    """Returns the digest of the processor, and of the number of threads that compute.

    `cpuinfo`: file of the Linux kernel; without it the name of the processor has to do.
    """
    try:
        first = cpuinfo.read_text(encoding="ascii", errors="replace").partition("\n\n")[0]
    except OSError:
        first = platform.processor()
    lines = [line for line in first.splitlines() if line.split("\t")[0].strip() in _CPU_LINES]
    known = (platform.machine(), lines or first, torch.get_num_threads())
    return _sha256(repr(known).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
