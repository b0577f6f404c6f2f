"""What each process imports when only its own extra is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Where they differ from the names of packages.
MODULE_NAMES = {
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry.exporter",
}
NOT_OF_PROCESSES = {"dev", "interpreter"}


def _modules_of(extra: str) -> set[str]:
    names = {Requirement(each).name for each in EXTRAS[extra]}
    return {MODULE_NAMES.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("scheduler_service.__main__", None),
        ("executor_service.__main__", "executor"),
        ("splitserve_gateway.__main__", "gateway"),
        ("splitserve_bench.__main__", "bench"),
        ("splitserve_cli.main", None),
        ("splitserve_client", None),
    ],
)
def test_process_imports_no_package_of_another_extra(module: str, extra: str | None) -> None:
    own = set() if extra is None else _modules_of(extra)
    others = set().union(*map(_modules_of, EXTRAS.keys() - NOT_OF_PROCESSES)) - own
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({sorted(others)!r}))\n"
        f"importlib.import_module({module!r})\n"
    )

    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert finished.returncode == 0, finished.stderr
