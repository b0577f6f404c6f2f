"""Compilation of the native CPU kernels, once for each version of the source and instruction set.

The result is stored in a cache directory, under a hash of source and flags. An image can contain
it: `python -m splitserve_kernels.cpu.build DIRECTORY` compiles every variant for this architecture,
with exit code 1 if one fails, and `SPLITSERVE_KERNEL_CACHE=DIRECTORY` uses them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "SPLITSERVE_KERNEL_CACHE"

_log = logging.getLogger(__name__)

_SOURCE_DIRECTORY = Path(__file__).parent / "native"
_MAIN_SOURCE = "splitserve_cpu.cpp"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-Wall",
    "-Wextra",
)
# Architectures of all variants but the portable one, as named by `platform.machine`.
_X86 = ("x86_64", "amd64")
_CPUINFO = Path("/proc/cpuinfo")
_TIMEOUT_S = 600


class BuildFailed(Exception):
    """Reports that the native kernels are not available here; the text says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Build for one instruction set. `cpu_flags`: required processor flags, as named by Linux."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
_AVX512_CPU = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"})

# Best first; the last one runs on every processor.
VARIANTS = (
    Variant(
        "avx512_bf16",
        _AVX512_CPU | {"avx512_bf16", "avx512_vnni"},
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    ),
    Variant("avx512_vnni", _AVX512_CPU | {"avx512_vnni"}, (*_AVX512, "-mavx512vnni")),
    Variant("avx512", _AVX512_CPU, _AVX512),
    Variant("avx2", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    Variant("portable", frozenset(), ()),
)


def best_variant() -> Variant:
    """Returns the best variant that this processor can run."""
    flags = _cpu_flags()
    return next(variant for variant in VARIANTS if variant.cpu_flags <= flags)


def library_path(variant: Variant, openmp: Path | None) -> Path:
    """Returns the path of the compiled kernels; compiles them if they are not in the cache.

    `openmp`: the OpenMP library to link with; None for the compiler's own. Raises BuildFailed.
    """
    path = _cached_path(variant)
    if path.is_file():
        return path
    return _compile(_compiler(), variant, openmp, path)


def check_buildable(variant: Variant) -> None:
    """Raises BuildFailed if `variant` is not compiled yet and there is no compiler for it."""
    if not _cached_path(variant).is_file():
        _compiler()


def _compiler() -> str:
    """Returns the path of the C++ compiler. Raises BuildFailed."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildFailed("no C++ compiler found (g++ or the one in CXX)")
    return compiler


def _cached_path(variant: Variant) -> Path:
    """Returns the cache path of the compiled `variant`. Raises BuildFailed."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCE_DIRECTORY.iterdir()):
        digest.update(source.read_bytes())
    digest.update(repr((variant.compiler_flags, _FLAGS, platform.machine())).encode())
    return cache_directory() / f"splitserve_cpu_{variant.name}_{digest.hexdigest()[:16]}.so"


def _compile(compiler: str, variant: Variant, openmp: Path | None, target: Path) -> Path:
    _log.info("compiling the CPU kernels for %s, once; this takes about 10 s", variant.name)
    started = time.monotonic()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            if target.is_file():
                return target
            # Without locks, several may compile: each replaces the file with an equal one.
            output = Path(scratch) / target.name
            linked = [] if openmp is None else [str(openmp)]
            source = str(_SOURCE_DIRECTORY / _MAIN_SOURCE)
            target_flags = [*_FLAGS, *variant.compiler_flags]
            command = [compiler, *target_flags, source, *linked, "-o", str(output)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode:
                raise BuildFailed(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            output.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{compiler}: {error}") from error
    _log.info("compiled in %.0f s: %s", time.monotonic() - started, target)
    return target


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Excludes other processes that compile into `directory`, if its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def cache_directory() -> Path:
    """Returns the directory of compiled kernels. Raises BuildFailed."""
    directory = os.environ.get(CACHE_VARIABLE)
    if directory:
        return Path(directory)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(base) if base else Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildFailed(f"no cache directory: {error}; set {CACHE_VARIABLE}") from error
    return cache / "splitserve" / "kernels"


def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset()
    )


def _main() -> int:
    """Compiles all variants; returns the exit code: 1 if a variant could not be compiled."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    os.environ[CACHE_VARIABLE] = sys.argv[1]
    is_x86 = platform.machine().lower() in _X86
    num_failed = 0
    for variant in VARIANTS:
        if variant.cpu_flags and not is_x86:
            continue
        try:
            library_path(variant, None)
        except BuildFailed as failure:
            _log.error("%s: %s", variant.name, failure)
            num_failed += 1
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(_main())
