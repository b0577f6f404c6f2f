"""The backend as the executor sees it, and what happens where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from splitserve_kernels import reference
from splitserve_kernels.gpu.launch import why_unavailable
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions, KVScales
from tests.kernels.problems import Shape, assert_close, make_problem

IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import splitserve_kernels.gpu
from splitserve_kernels.gpu.launch import why_unavailable
print(why_unavailable())
"""
LEAVE_TRITON_ALONE_UNTIL_ASKED = """
import sys
from splitserve_kernels import paged_batch, reference
from splitserve_kernels.gpu import launch
print("triton" in sys.modules)
print(launch.why_unavailable())
"""


def _output_of(program: str, **environment: str) -> str:
    path = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_availability_names_triton_when_it_is_missing() -> None:
    assert _output_of(IMPORT_WITHOUT_TRITON) == "triton is not installed"


def test_availability_imports_triton_only_when_asked() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    is_imported, said = _output_of(LEAVE_TRITON_ALONE_UNTIL_ASKED, **environment).splitlines()
    assert is_imported == "False"
    assert said == "there is no CUDA device, and TRITON_INTERPRET=1 is not set"


@pytest.mark.parametrize(
    "rows",
    [
        ((0, 5), (70, 1), (8, 20)),
        ((0, 1), (70, 1), (8, 1)),
        ((300, 1), (0, 1), (70, 1), (8, 20), (5, 1), (0, 70)),
    ],
)
def test_backend_equals_the_oracle_when_it_writes_and_attends(
    rows: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from splitserve_kernels.gpu.attention import backend as gpu_backend

    assert why_unavailable() is None
    shape = Shape(8, 2, 32, 32, 16, rows)
    options = AttentionOptions(scale=0.3)
    backends: tuple[AttentionBackend, ...] = (reference, gpu_backend)
    outputs = []
    for backend in backends:
        problem = make_problem(shape, device)
        num_tokens = problem.query.shape[0]
        generator = torch.Generator().manual_seed(3)
        key, value = torch.randn(2, num_tokens, 2, 32, generator=generator).to(device)
        pools = (problem.key_pool, problem.value_pool)
        backend.write_kv(key, value, *pools, problem.batch)
        outputs.append(backend.paged_attention(problem.query, *pools, problem.batch, options))
    assert_close(outputs[1], outputs[0].cpu())


def _pretend_multiprocessors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 prompts fill the device, with many they leave room."""
    from splitserve_kernels.gpu.attention import backend, tile_sizes

    for module in (tile_sizes, backend):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _device: number)


@pytest.mark.parametrize(
    ("rows", "is_split"),
    [
        (((30, 20),), True),
        (((30, 1), (9, 1), (30, 20)), True),
        # 4 tiles of 32 tokens for each of 2 key/value heads are half of 16.
        (((30, 128),), True),
        ((*[(9, 1)] * 40, (30, 128)), True),
        (((30, 129),), False),
    ],
)
def test_backend_splits_prompts_when_they_leave_half_of_the_device_idle(
    rows: tuple[tuple[int, int], ...], is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from splitserve_kernels.gpu.attention import backend

    _pretend_multiprocessors(16, monkeypatch)
    called: list[str] = []
    for name in ("paged_decode", "paged_prefill", "paged_split_prefill"):
        monkeypatch.setattr(backend, name, lambda *_, name=name, **__: called.append(name))
    shape = Shape(8, 2, 32, 32, 16, rows)
    problem = make_problem(shape, torch.device("cpu"), torch.bfloat16)
    pools, options = (problem.key_pool, problem.value_pool), AttentionOptions(scale=0.3)
    backend.paged_attention(problem.query, *pools, problem.batch, options)
    assert called == ["paged_decode", "paged_split_prefill" if is_split else "paged_prefill"]


@pytest.mark.parametrize("num_multiprocessors", [1, 40])
@pytest.mark.parametrize("num_added", [(0, 1), (3, 0), (70, 2)])
def test_backend_finds_rows_on_the_device_when_some_are_added(
    num_added: tuple[int, int],
    num_multiprocessors: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a recorded step: which rows have tokens only the device knows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from splitserve_kernels.gpu.attention import backend

    _pretend_multiprocessors(num_multiprocessors, monkeypatch)
    rows, num_decodes = ((300, 1), (5, 1), (70, 9), (0, 130), (2, 3)), 2
    problem = make_problem(Shape(4, 1, 32, 32, 16, rows), device)
    options, pools = AttentionOptions(scale=0.3), (problem.key_pool, problem.value_pool)
    expected = reference.paged_attention(problem.query, *pools, problem.batch, options)
    batch, (decodes_added, prompts_added) = problem.batch, num_added

    def with_added(numbers: torch.Tensor, added: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        first, last = numbers[:num_decodes], numbers[num_decodes:]
        parts = [first, added.expand(decodes_added, *numbers.shape[1:])]
        return torch.cat([*parts, last, ends.expand(prompts_added, *numbers.shape[1:])])

    starts, none = batch.query_starts, torch.zeros_like(batch.num_computed_tokens[0])
    recorded = replace(
        batch,
        num_computed_tokens=with_added(batch.num_computed_tokens, none, none),
        block_tables=with_added(batch.block_tables, none, none),
        query_starts=with_added(starts, starts[num_decodes], starts[-1]),
        num_decodes=num_decodes + decodes_added,
        max_num_new_tokens=len(problem.query),
    )
    # Added tokens are no row's.
    query = torch.cat([problem.query, torch.ones_like(problem.query[:40])])
    actual = backend.paged_attention(query, *pools, recorded, options)
    assert_close(actual[: len(expected)], expected.cpu())


def test_backend_undoes_the_scales_when_pools_have_8_bits(device: torch.device) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from splitserve_kernels.gpu.attention import backend

    problem = make_problem(Shape(2, 1, 32, 32, 16, ((0, 5),)), device)
    narrow = [pool.to(torch.float8_e4m3fn) for pool in (problem.key_pool, problem.value_pool)]
    scales, options = KVScales(key=0.02, value=0.01), AttentionOptions(scale=0.3)
    key, value = torch.randn(2, 5, 1, 32, generator=torch.Generator().manual_seed(3)).to(device)
    backend.write_kv(key, value, narrow[0], narrow[1], problem.batch, scales)
    actual = backend.paged_attention(
        problem.query, narrow[0], narrow[1], problem.batch, options, scales
    )
    reference.write_kv(key, value, problem.key_pool, problem.value_pool, problem.batch)
    expected = reference.paged_attention(
        problem.query, problem.key_pool, problem.value_pool, problem.batch, options
    )
    # Three bits behind the point.
    torch.testing.assert_close(actual, expected, atol=0.15, rtol=0)
