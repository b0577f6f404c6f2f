"""What the command line is to start without, as it takes long to import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("splitserve_cli.main", ["numpy", "grpc", "httpx2", "splitserve_bench"]),
        ("splitserve_cli.serve", ["grpc", "tokenizers", "jinja2", "torch"]),
    ],
)
def test_command_line_starts_without_what_only_some_commands_need(
    module: str, heavy: list[str]
) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, check=True, text=True
    )

    assert done.stdout.strip() == "[]"
