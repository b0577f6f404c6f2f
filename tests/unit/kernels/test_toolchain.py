"""What compilers a machine has: the real one where it is there, and scripts that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from splitserve_kernels import toolchain
from splitserve_kernels.cpu import build
from splitserve_kernels.toolchain import main, why_no_c_modules, why_no_cpu_kernels

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
def test_c_modules_need_the_headers_of_python_when_there_is_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain, "_python_headers", lambda: str(tmp_path))
    assert "Python.h" in str(why_no_c_modules())


@pytest.mark.usefixtures("no_compilers")
def test_c_modules_cannot_be_had_when_there_is_no_compiler() -> None:
    assert why_no_c_modules() == "there is no C compiler (gcc or clang, or what CC names)"


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


def test_cpu_kernels_can_be_had_without_a_compiler_when_they_are_compiled(
    no_compilers: Path,
) -> None:
    assert why_no_cpu_kernels() == "there is no C++ compiler (g++, or what CXX names)"
    no_compilers.mkdir()
    build._cached_path(build.best_variant()).touch()
    assert why_no_cpu_kernels() is None


@pytest.mark.usefixtures("no_compilers")
def test_program_ends_with_1_and_names_both_when_there_is_no_compiler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 1
    c_modules, cpu_kernels = capsys.readouterr().err.splitlines()
    assert c_modules.startswith("c_modules: there is no C compiler")
    assert cpu_kernels.startswith("cpu_kernels: there is no C++ compiler")

    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"c_modules", "cpu_kernels"}
