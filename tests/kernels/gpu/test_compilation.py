"""The real compiler takes every kernel for three generations of GPUs, and it fits into them.

What was compiled is remembered by what it was compiled from: compiling takes a minute of a core.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

import splitserve_kernels
from splitserve_kernels.gpu.attention.occupancy import programs_per_multiprocessor
from splitserve_kernels.gpu.attention.tile_sizes import decode_tile_sizes
from splitserve_kernels.gpu.attention.tiles import attention_constants
from tests.kernels.gpu.compiled import cases
from tests.kernels.gpu.compiled.resources import SHARED_BYTES, Bounds, Resources

KERNELS = Path(splitserve_kernels.__file__).parent
KERNEL_NAME = re.compile(r"^@triton\.jit.*\ndef (\w*_kernel)\(", re.MULTILINE)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU"),
    # 20 seconds of a core, of which there may be little.
    pytest.mark.timeout(1800),
]


@pytest.fixture(params=cases.CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def compiled(
    capability: int, tmp_path: Path, pytestconfig: pytest.Config
) -> list[tuple[str, Resources]]:
    """What each case has of kernels."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("compiled_kernels")
    remembered = folder / f"{_hash_of_sources()}-{capability}.jsonl"
    if not remembered.exists():
        found = _compile(capability, tmp_path)
        for old in folder.glob(f"*-{capability}.jsonl"):
            old.unlink(missing_ok=True)
        # Whole or not at all: another process may look.
        written = folder / f"{os.getpid()}.part"
        written.write_text(found)
        written.rename(remembered)
    lines = [json.loads(line) for line in remembered.read_text().splitlines()]
    return [(line.pop("case"), Resources(**line)) for line in lines]


def _compile(capability: int, cache: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compiled.compiler", str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _hash_of_sources() -> str:
    digest = hashlib.sha256(triton.__version__.encode())
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> Iterator[Path]:
    """All that a compiled kernel may depend on, and more."""
    yield from sorted(KERNELS.glob("*.py"))
    for path in sorted((KERNELS / "gpu").rglob("*.py")):
        # Those launch what others compiled.
        if not path.name.startswith("flash_attention_3"):
            yield path
    yield from sorted(Path(cases.__file__).parent.glob("*.py"))


def test_kernels_fit_when_they_are_compiled(
    capability: int, compiled: list[tuple[str, Resources]]
) -> None:
    reasons = [
        f"{case}: {reason}"
        for case, found in compiled
        if (reason := _bounds(case, found).why_not(found, capability)) is not None
    ]
    assert not reasons


def _bounds(case: str, found: Resources) -> Bounds:
    return cases.CASES[case].bounds.get(found.kernel, Bounds())


def test_decodes_run_as_many_at_a_time_as_they_are_launched_for(
    capability: int, compiled: list[tuple[str, Resources]]
) -> None:
    decodes = {case: found for case, found in compiled if found.kernel == "_decode_kernel"}
    assert decodes
    for case, found in decodes.items():
        layer = cases.ATTENTION_LAYERS[case]
        constants = attention_constants(layer.query(1), layer.pools(), cases.EVERYTHING)
        sizes = decode_tile_sizes(constants)
        launched = programs_per_multiprocessor(SHARED_BYTES[capability], constants, sizes)
        assert launched <= found.programs_at_once(capability), case


def test_every_kernel_has_a_case(compiled: list[tuple[str, Resources]]) -> None:
    sources = "".join(path.read_text() for path in (KERNELS / "gpu").rglob("*.py"))
    known = {found.kernel for _, found in compiled}
    assert set(KERNEL_NAME.findall(sources)) - known == set()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Resources("k", 4, 255, 0, 167_000, 2), "shared_bytes is 167000, allowed: at most 166912"),
        (Resources("k", 4, 33, 40, 0, 2), "spilled_bytes is 40, allowed: at most 16"),
        (Resources("k", 4, 256, 0, 0, 2), "registers is 256, allowed: at most 255"),
        (Resources("k", 4, 33, 0, 0, 1), "loads_ahead is 1, allowed: at least 2"),
        (Resources("k", 4, 33, 0, 0, 2), None),
    ],
)
def test_bounds_name_what_is_beyond_them(found: Resources, reason: str | None) -> None:
    said = Bounds(loads_ahead=2).why_not(found, 80)
    assert said == (None if reason is None else f"k: {reason}")
