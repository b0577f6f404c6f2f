"""Where things live and who may import whom, as far as a linter cannot see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOC_PYTHON = ROOT / ".tools" / "protoc" / "bin" / "python"
SOURCE_ROOTS = (".", "common", "protos", "kernels", "clients")

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({"torch", "transformers", "executor_service"} & sys.modules.keys()))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in SOURCE_ROOTS)
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("folder", ["common", "kernels", "protos", "clients", "protos/splitserve"])
def test_source_root_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "package", ["scheduler_service", "splitserve_client", "splitserve_rpc", "splitserve_text"]
)
def test_import_leaves_torch_alone_when_everything_is_imported(package: str) -> None:
    result = run_python("-c", IMPORT_ALL, package)

    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.skipif(not PROTOC_PYTHON.exists(), reason="grpcio-tools: make protos installs it")
def test_generated_code_is_current() -> None:
    environment = os.environ | {"PYTHON": str(PROTOC_PYTHON)}
    result = subprocess.run(
        [ROOT / "tools" / "check_protos.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_lists_of_options_are_current() -> None:
    result = run_python(str(ROOT / "tools" / "list_options.py"), "--check")

    assert (result.returncode, result.stderr) == (0, "")
