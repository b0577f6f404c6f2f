"""Check for the compilers that kernels need. Imports neither torch nor Triton.

Triton compiles small C modules at run time, one for a GPU's driver and one for each kernel: that
takes a C compiler and the headers of Python. The CPU kernels need a C++ compiler, unless they are
compiled already. `python -m splitserve_kernels.toolchain` tries both, with exit code 1 if one
fails; `--json` prints the failures as one object, with exit code 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from splitserve_kernels.cpu.build import BuildFailed, best_variant, check_buildable

_TIMEOUT_S = 60
_NAME = "splitserve_toolchain_probe"
# Like a launcher of Triton: uses Python's C API, and can be imported.
_SOURCE = f"""\
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{_NAME}", NULL, -1, NULL}};

PyMODINIT_FUNC PyInit_{_NAME}(void) {{ return PyModule_Create(&module); }}
"""


def why_no_c_modules() -> str | None:
    """Returns why no C module for Python can be compiled and imported here; None if one can."""
    # Same choice as `triton/runtime/build.py`.
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler found (gcc, clang or the one in CC)"
    with tempfile.TemporaryDirectory() as folder:
        source, module = Path(folder, f"{_NAME}.c"), Path(folder, f"{_NAME}.so")
        source.write_text(_SOURCE, encoding="ascii")
        command = [compiler, str(source), "-O3", "-shared", "-fPIC", "-o", str(module)]
        try:
            done = subprocess.run(
                [*command, f"-I{_python_headers()}"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                return f"{compiler} failed: {_first_error(done.stderr)}"
            spec = importlib.util.spec_from_file_location(_NAME, module)
            assert spec is not None, "the suffix is that of an extension module"
            importlib.util.module_from_spec(spec)
        except (OSError, ImportError, subprocess.TimeoutExpired) as error:
            return f"{compiler}: {error}"
    return None


def why_no_cpu_kernels() -> str | None:
    """Returns why the CPU kernels for this processor are not available; None if they are.

    Compiles nothing: checks that they are compiled already or that there is a compiler.
    """
    try:
        check_buildable(best_variant())
    except BuildFailed as failure:
        return str(failure)
    return None


CHECKS = MappingProxyType({"c_modules": why_no_c_modules, "cpu_kernels": why_no_cpu_kernels})


def _python_headers() -> str:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder without the headers.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no reason")


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="splitserve_kernels.toolchain", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the failures as one JSON object")
    options = parser.parse_args(arguments)
    checks: dict[str, Callable[[], str | None]] = dict(CHECKS)
    problems = {name: why for name, check in checks.items() if (why := check()) is not None}
    if options.json:
        sys.stdout.write(json.dumps(problems) + "\n")
        return 0
    for name in checks:
        sys.stderr.write(f"{name}: {problems.get(name, 'ok')}\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
