"""Where things live and who may import whom, as far as a linter cannot see it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOC_PYTHON = ROOT / ".tools" / "protoc" / "bin" / "python"
SOURCE_ROOTS = (".", "common", "protos", "kernels", "clients")
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
IMPORT = re.compile(r"^ *from ([a-z_.0-9]+) import", re.MULTILINE)
IMPORTED_BY_PATH = {
    # Their `__init__` runs before that of each subpackage, which needs less.
    "scheduler_service",
    "executor_service",
    "splitserve_kernels",
    "splitserve_gateway",
    "splitserve_cli",
    "splitserve_bench",
    # The doctor imports each check late, since a missing package is a finding.
    "splitserve_cli.checks",
    # These need a package of an extra, or a GPU.
    "scheduler_service.callers.tokens",
    "scheduler_service.watching.request_trace",
    "scheduler_service.watching.request_traces",
    "executor_service.backends.gpu_draw",
    "executor_service.decoders.gpu_decoder",
    "splitserve_bench.targets.openai_target",
    "splitserve_grammars.answer_process",
    "splitserve_grammars.llguidance_text",
    "splitserve_grammars.trial_process",
    "splitserve_kernels.gpu",
    "splitserve_kernels.gpu.attention",
    "splitserve_kernels.gpu.quantized",
    "splitserve_kernels.gpu.sampling",
    "splitserve_live.server",
    "splitserve_tracing.tracing",
    # These run as programs: `python -m`.
    "scheduler_service.watching.explain_journal",
    "splitserve_kernels.cpu.build",
    "splitserve_rpc.healthcheck",
}

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


def test_executor_binds_its_port_before_it_imports_torch() -> None:
    result = run_python(
        "-c", "import executor_service.__main__, sys; print('torch' in sys.modules)"
    )

    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


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


def _packages() -> dict[str, Path]:
    """Returns the folder of each of our packages by its name."""
    return {
        ".".join(found.parent.relative_to(top.parent).parts): found.parent
        for top in (ROOT / path for path in WHEEL["wheel"]["packages"])
        if top.parent.name != "protos"
        for found in top.rglob("__init__.py")
    }


def test_packages_are_imported_and_not_their_modules() -> None:
    packages = _packages()
    folders = (*packages.values(), *(ROOT / "tests").rglob("."), *(ROOT / "benchmarks").rglob("."))

    by_path = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in (file for folder in folders for file in folder.glob("*.py"))
        for module in IMPORT.findall(file.read_text())
        if (package := module.rpartition(".")[0]) in packages
        and module not in packages
        and not module.endswith(".__main__")
        and not {module, package} & IMPORTED_BY_PATH
        and not file.is_relative_to(packages[package])
    ]

    assert by_path == []
