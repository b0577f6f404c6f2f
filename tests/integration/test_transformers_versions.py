"""Configurations, angles, decoders and the bundled model with other versions of transformers.

`make transformers-versions` puts them beside `.venv`, which has the newest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / ".tools" / "transformers"
TESTS = (
    "tests/unit/executor/decoders/test_llama_config.py",
    "tests/unit/executor/decoders/test_decoder.py::"
    "test_build_native_model_passes_when_unknown_fields_change_nothing",
    "tests/unit/executor/decoders/test_decoder.py::"
    "test_build_native_model_raises_when_an_unknown_field_changes_logits",
    "tests/unit/executor/model/test_rope_scaling.py",
    "tests/unit/executor/service/test_quiet_start.py::"
    "test_start_is_quiet_when_the_model_is_the_bundled_one",
)


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("version", ["5.13.0", "5.17.0"])
def test_decoders_take_the_same_models_when_transformers_is_older(version: str) -> None:
    overlay = VERSIONS / version
    if not (overlay / ".ready").exists():
        pytest.skip(f"transformers {version} is not installed: make transformers-versions")
    environment = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    path = os.pathsep.join([str(overlay), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    report = f"import transformers as t; assert t.__version__ == '{version}', t.__version__"
    tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *TESTS]
    for command in ([sys.executable, "-c", report], tests):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
