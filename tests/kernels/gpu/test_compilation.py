"""The real compiler takes every kernel for its generations of GPUs, and it fits into them.

What was compiled is recorded with what it was compiled from; see `compiled/records.py`. Of kernels
that have changed since it is remembered.
"""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from splitserve_kernels.gpu.attention.tile_sizes import (
    Target,
    decode_tile_sizes,
    prefill_tile_sizes,
    programs_per_multiprocessor,
    target_of,
)
from splitserve_kernels.gpu.attention.tiles import attention_constants
from tests.kernels.gpu.compiled import cases, records
from tests.kernels.gpu.compiled.records import (
    KERNELS,
    compiled_anew,
    hash_of_sources,
    recorded,
)
from tests.kernels.gpu.compiled.resources import SHARED_BYTES, Bounds, Resources

KERNEL_NAME = re.compile(r"^@triton\.jit.*\ndef (\w*_kernel)\(", re.MULTILINE)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU"),
    # A minute of a core, of which there may be little.
    pytest.mark.timeout(1800),
]


@pytest.fixture(params=cases.CAPABILITIES)
def capability(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def compiled(capability: int, pytestconfig: pytest.Config) -> list[tuple[str, Resources]]:
    """What each case has of kernels."""
    found = recorded(capability) or _remembered(capability, pytestconfig)
    lines = [json.loads(line) for line in found.splitlines()]
    return [(line.pop("case"), Resources(**line)) for line in lines]


def _remembered(capability: int, config: pytest.Config) -> str:
    assert config.cache is not None
    folder = config.cache.mkdir("compiled_kernels")
    remembered = folder / f"{hash_of_sources()}-{capability}.jsonl"
    if not remembered.exists():
        found = compiled_anew(capability)
        for old in folder.glob(f"*-{capability}.jsonl"):
            old.unlink(missing_ok=True)
        # Whole or not at all: another process may look.
        written = folder / f"{os.getpid()}.part"
        written.write_text(found)
        written.rename(remembered)
    return remembered.read_text()


def test_kernels_fit_when_they_are_compiled(
    capability: int, compiled: list[tuple[str, Resources]]
) -> None:
    reasons = [
        f"{case}: {reason}"
        for case, found in compiled
        if (reason := _bounds(case, found).why_not(found, capability)) is not None
    ]
    assert not reasons


def test_nothing_is_recorded_when_a_source_has_changed(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "hash_of_sources", lambda: "of others")
    assert recorded(capability) is None


def _bounds(case: str, found: Resources) -> Bounds:
    return cases.CASES[case].bounds.get(found.kernel, Bounds())


def test_programs_that_share_keys_reach_their_planned_occupancy(
    capability: int, compiled: list[tuple[str, Resources]]
) -> None:
    layers = cases.ATTENTION_LAYERS | cases.FEW_TOKENS_LAYERS
    shared = {case: found for case, found in compiled if found.kernel == "_decode_kernel"}
    assert layers.keys() & shared.keys()
    for case in layers.keys() & shared.keys():
        layer, found = layers[case], shared[case]
        constants = attention_constants(layer.query(1), layer.pools(), cases.EVERYTHING)
        sizes = decode_tile_sizes(constants, Target.of(capability))
        if case in cases.FEW_TOKENS_LAYERS:
            sizes = prefill_tile_sizes(constants, cases.NUM_FEW, Target.of(capability))
        launched = programs_per_multiprocessor(SHARED_BYTES[capability], constants, sizes)
        assert launched <= found.programs_at_once(capability), case


def test_products_run_beside_the_softmax_where_tiles_say_so(
    capability: int, compiled: list[tuple[str, Resources]]
) -> None:
    prompts = {case: found for case, found in compiled if found.kernel == "_prefill_kernel"}
    assert not [case for case, found in prompts.items() if found.is_serial]
    for case in cases.ATTENTION_LAYERS.keys() & prompts.keys():
        layer = cases.ATTENTION_LAYERS[case]
        constants = attention_constants(layer.query(1), layer.pools(), cases.EVERYTHING)
        sizes = prefill_tile_sizes(constants, 600, Target.of(capability))
        assert sizes.overlaps == (capability == 90 and sizes.num_queries >= 64)
        overlaps = sizes.overlaps and not layer.pools().is_float8
        assert (prompts[case].exponents_beside_products > 10) == overlaps, case


def test_every_kernel_has_a_case(capability: int, compiled: list[tuple[str, Resources]]) -> None:
    sources = "".join(path.read_text() for path in (KERNELS / "gpu").rglob("*.py"))
    known = {found.kernel for _, found in compiled}
    if capability < 89:
        known |= cases.KERNELS_SINCE_ADA
    assert set(KERNEL_NAME.findall(sources)) - known == set()


@pytest.mark.parametrize(
    ("properties", "shared_bytes"),
    [({"shared_memory_per_block_optin": 90_000}, 90_000), ({}, 99 * 1024)],
)
def test_tiles_are_sized_by_what_the_device_says(
    properties: dict[str, int], shared_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 7)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(**properties)
    )
    assert target_of.__wrapped__(device) == Target(86, shared_bytes)


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
