"""Without `--traces-to` a process loads nothing that writes traces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_PATHS = [ROOT / each for each in (".", "common", "protos", "clients")]

PROGRAM = """
import sys, {module}
writers = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")
print([name for name in sys.modules if name.startswith(writers)])
"""


# FastAPI has the interfaces of OpenTelemetry, which do nothing by themselves.
@pytest.mark.parametrize("module", ["scheduler_service.__main__", "splitserve_gateway.__main__"])
def test_sdk_is_not_imported_when_nobody_wants_traces(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        env={
            "PYTHONPATH": ":".join(
                str(ROOT / each) for each in (".", "common", "protos", "clients")
            )
        },
        capture_output=True,
        text=True,
        check=True,
    )

    assert ended.stdout == "[]\n"
