"""Builds of the CPU kernels, by compilers that are scripts; which compilers a machine has."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitserve_kernels import toolchain
from splitserve_kernels.cpu import build
from splitserve_kernels.cpu.build import (
    CACHE_VARIABLE,
    VARIANTS,
    BuildFailed,
    best_variant,
    library_path,
)
from splitserve_kernels.toolchain import main, why_no_c_modules, why_no_cpu_kernels

PORTABLE = VARIANTS[-1]
# Writes what it was called with to the file that follows -o, as the last argument.
_COPYING = '#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n'
_FAILING = "#!/bin/sh\necho 'simd.h:7: no such register' >&2\nexit 1\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, which does not exist yet."""
    directory = tmp_path / "cache" / "kernels"
    monkeypatch.setenv(CACHE_VARIABLE, str(directory))
    return directory


def _use_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    compiler = directory / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return _use_compiler(tmp_path, monkeypatch, _COPYING)


def _forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("compiler")
def test_library_path_compiles_into_the_directory_when_the_environment_names_one(
    cache: Path,
) -> None:
    path = library_path(PORTABLE, None)
    assert path.parent == cache
    # Nothing else is left behind.
    assert list(cache.iterdir()) == [path]


@pytest.mark.usefixtures("compiler")
def test_library_path_compiles_below_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library_path(PORTABLE, None).parent == tmp_path / "xdg" / "splitserve" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".cache" / "splitserve" / "kernels"
    assert library_path(PORTABLE, None).parent == expected


@pytest.mark.usefixtures("compiler")
def test_library_path_compiles_nothing_when_the_cache_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = library_path(PORTABLE, None)
    _forbid_processes(monkeypatch)
    assert library_path(PORTABLE, None) == path


@pytest.mark.usefixtures("compiler")
def test_library_path_needs_no_compiler_when_the_cache_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library_path(PORTABLE, None)
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert library_path(PORTABLE, None) == path


@pytest.mark.usefixtures("compiler")
def test_library_path_compiles_again_when_the_source_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library_path(PORTABLE, None)
    source = tmp_path / "native"
    source.mkdir()
    (source / "splitserve_cpu.cpp").write_text("// another")
    monkeypatch.setattr(build, "_SOURCE_DIRECTORY", source)
    assert library_path(PORTABLE, None) != before


@pytest.mark.usefixtures("compiler")
def test_library_path_is_another_when_the_variant_is() -> None:
    assert len({library_path(variant, None) for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.usefixtures("compiler")
def test_library_path_hands_the_compiler_flags_and_openmp_when_it_compiles() -> None:
    command = library_path(VARIANTS[0], Path("/some/libgomp.so.1")).read_text().split()
    assert set(VARIANTS[0].compiler_flags) <= set(command)
    assert "/some/libgomp.so.1" in command
    assert "-fopenmp" in command


def test_library_path_says_what_the_compiler_said_when_it_fails(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = _use_compiler(tmp_path, monkeypatch, _FAILING)
    with pytest.raises(BuildFailed, match=f"{compiler} failed: simd.h:7: no such register"):
        library_path(PORTABLE, None)
    assert list(cache.iterdir()) == []


def test_library_path_raises_when_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    _forbid_processes(monkeypatch)
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        library_path(PORTABLE, None)


def test_library_path_raises_when_the_compiler_takes_forever(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_kwargs: object) -> None:
        raise subprocess.TimeoutExpired(command, 600)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BuildFailed, match=f"{compiler}: .*timed out"):
        library_path(PORTABLE, None)


@pytest.mark.usefixtures("compiler")
def test_library_path_raises_when_the_cache_cannot_be_written(cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(BuildFailed, match=str(cache)):
        library_path(PORTABLE, None)


@pytest.mark.usefixtures("compiler")
def test_library_path_raises_when_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with the id of no user."""

    def know_nobody(user_id: int) -> None:
        raise KeyError(user_id)

    for variable in (CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", know_nobody)
    with pytest.raises(BuildFailed):
        library_path(PORTABLE, None)


def test_library_path_compiles_once_when_several_need_it_at_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    _use_compiler(tmp_path, monkeypatch, _COPYING.replace("\n", f"\necho >> '{calls}'\n", 1))
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: library_path(PORTABLE, None), range(8)))
    assert list(cache.iterdir()) == [paths[0]]
    assert set(paths) == {paths[0]}
    assert paths[0].read_text().startswith("-std=")
    assert calls.read_text() == "\n"


@pytest.mark.usefixtures("compiler")
def test_library_path_leaves_one_whole_file_when_there_are_no_locks(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: library_path(PORTABLE, None), range(8)))
    assert list(cache.iterdir()) == list(paths)


@pytest.mark.usefixtures("compiler")
def test_program_compiles_every_variant_when_it_is_given_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "image"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-m", "splitserve_kernels.cpu.build", str(directory)],
        check=True,
        capture_output=True,
        env=environment,
    )
    names = sorted(path.name.rsplit("_", 1)[0] for path in directory.iterdir())
    assert names == sorted(f"splitserve_cpu_{variant.name}" for variant in VARIANTS)


def _build_for_image(
    directory: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, set[str]]:
    """The program's exit code, and the variants that it compiled, on a machine of that name."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "argv", ["build", str(directory)])
    code = build._main()
    names = {path.name.removeprefix("splitserve_cpu_") for path in directory.glob("*.so")}
    return code, {name.rpartition("_")[0] for name in names}


def test_program_ends_with_1_when_one_variant_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_compiler(
        tmp_path,
        monkeypatch,
        '#!/bin/sh\nfor last; do [ "$last" != -mavx512bf16 ] || exit 1; done\n: > "$last"\n',
    )
    code, compiled = _build_for_image(tmp_path / "image", "x86_64", monkeypatch)
    assert (code, compiled) == (1, {"avx512_vnni", "avx512", "avx2", "portable"})


@pytest.mark.usefixtures("compiler")
def test_program_compiles_only_the_portable_variant_without_x86(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _build_for_image(tmp_path / "image", "aarch64", monkeypatch) == (0, {"portable"})


def test_program_ends_with_1_when_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert _build_for_image(tmp_path / "image", "aarch64", monkeypatch) == (1, set())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2", "portable"),
        ("fpu avx2", "portable"),
        ("avx2 fma", "portable"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f avx512bw", "avx2"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("fma avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512_vnni"),
        ("fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile", "avx512_bf16"),
    ],
)
def test_best_variant_is_what_the_processor_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: some\nflags\t\t: {flags}\n")
    monkeypatch.setattr(build, "_CPUINFO", cpuinfo)
    assert best_variant().name == expected


@pytest.mark.parametrize("content", [None, "", "processor: 0\nFeatures: asimd\n"])
def test_best_variant_is_portable_when_no_flags_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    monkeypatch.setattr(build, "_CPUINFO", tmp_path / "cpuinfo")
    assert best_variant() is PORTABLE


needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(toolchain._python_headers(), "Python.h").is_file(),
    reason="needs gcc and Python.h",
)


@pytest.fixture
def no_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is in PATH, and no kernels are compiled. Returns the folder for these."""
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@needs_gcc
def test_c_modules_can_be_had_when_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert why_no_c_modules() is None


@needs_gcc
def test_c_modules_need_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain, "_python_headers", lambda: str(tmp_path))
    assert "Python.h" in str(why_no_c_modules())


@pytest.mark.usefixtures("no_compilers")
def test_c_modules_cannot_be_had_when_there_is_no_compiler() -> None:
    assert why_no_c_modules() == "no C compiler found (gcc, clang or the one in CC)"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "no reason"),
        ("echo 'x.c: In function' >&2; echo 'x.c:1: error: bad' >&2; exit 1", "x.c:1: error: bad"),
        # It says that all is well and writes no module.
        ("exit 0", "probe.so"),
    ],
)
def test_c_modules_cannot_be_had_when_the_compiler_fails(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    reason = why_no_c_modules()
    assert reason is not None
    assert reason.startswith(f"{compiler}")
    assert said in reason


def test_cpu_kernels_need_no_compiler_when_they_are_compiled(
    no_compilers: Path,
) -> None:
    assert why_no_cpu_kernels() == "no C++ compiler found (g++ or the one in CXX)"
    no_compilers.mkdir()
    build._cached_path(build.best_variant()).touch()
    assert why_no_cpu_kernels() is None


@pytest.mark.usefixtures("no_compilers")
def test_toolchain_program_ends_with_1_without_a_compiler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 1
    c_modules, cpu_kernels = capsys.readouterr().err.splitlines()
    assert c_modules.startswith("c_modules: no C compiler found")
    assert cpu_kernels.startswith("cpu_kernels: no C++ compiler found")

    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"c_modules", "cpu_kernels"}
