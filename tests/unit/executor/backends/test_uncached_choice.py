"""Which code computes models of vectors without KV blocks, and what is said of slower code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_service.backends import AUTO, NATIVE, TORCH, Compute, choose_compute
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import PackedLinearModule
from executor_service.errors import BackendUnavailable
from executor_service.model import LoadedModel
from splitserve_kernels.cpu import NativeLibrary
from splitserve_kernels.cpu.build import BuildFailed
from tests.support.models.vector_models import EMBEDDING, make_vector_model, random_rows

Load = Callable[[], LoadedModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    make_vector_model("bert", tmp_path)
    return lambda: load_model(ModelConfig(str(tmp_path)))


def vectors(compute: Compute) -> Tensor:
    """Vectors of a few rows, [R, N]."""
    parts = compute.loaded.vector_parts
    assert parts is not None
    assert parts.uncached is not None
    rows = [(torch.tensor(row), EMBEDDING) for row in random_rows(3, 100, 17)]
    found = parts.uncached.vectors(rows)
    return torch.stack([each for each in found if isinstance(each, Tensor)])


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Level and first word of each warning or error."""
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    of_choice = [r for r in records if "pooling_assumed" not in r.getMessage()]
    return [(r.levelno, r.getMessage().split()[0]) for r in of_choice]


@pytest.mark.parametrize("name", [AUTO, NATIVE])
def test_matrices_are_native_when_torch_is_not_demanded(
    load: Load, native_library: NativeLibrary, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    compute = choose_compute(load, name, None)
    assert compute.description == f"native matrices ({native_library.variant}), rows side by side"
    assert compute.why_slow is None
    in_torch = choose_compute(load, TORCH, None)
    assert in_torch.description == "torch, rows side by side"
    assert in_torch.why_slow == "--attention-backend is torch"
    torch.testing.assert_close(vectors(compute), vectors(in_torch), atol=2e-5, rtol=0)
    assert compute.loaded.weights_bytes == pytest.approx(in_torch.loaded.weights_bytes, rel=0.2)
    assert said(caplog) == []


@pytest.mark.usefixtures("native_library")
def test_matrices_stay_in_torch_when_native_ones_are_wrong(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = PackedLinearModule.forward
    monkeypatch.setattr(
        PackedLinearModule, "forward", lambda self, rows: forward(self, rows) * 1.001
    )
    compute = choose_compute(load, AUTO, None)
    assert compute.description == "torch, rows side by side"
    assert str(compute.why_slow).startswith("relative error of the vectors")
    assert said(caplog) == [(logging.ERROR, "packed_matrices_refused")]
    assert torch.equal(vectors(compute), vectors(choose_compute(load, TORCH, None)))
    with pytest.raises(BackendUnavailable, match="native: relative error of the vectors"):
        choose_compute(load, NATIVE, None)


def test_matrices_stay_in_torch_when_there_is_no_compiler(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> NativeLibrary:
        raise BuildFailed("no C++ compiler")

    monkeypatch.setattr("executor_service.backends.choose.load_library", fail)
    compute = choose_compute(load, AUTO, None)
    assert (compute.description, compute.why_slow) == (
        "torch, rows side by side",
        "no C++ compiler",
    )
    assert said(caplog) == [(logging.WARNING, "packed_matrices_refused")]
    with pytest.raises(BackendUnavailable, match="native: no C\\+\\+ compiler"):
        choose_compute(load, NATIVE, None)


def test_backend_of_another_device_is_refused(load: Load) -> None:
    with pytest.raises(BackendUnavailable, match="triton: not for cpu"):
        choose_compute(load, "triton", None)


@pytest.mark.usefixtures("native_library")
def test_matrices_are_rounded_when_int8_was_asked(load: Load) -> None:
    compute = choose_compute(load, AUTO, None, is_int8=True)
    assert compute.is_int8
    assert compute.description.endswith("rows side by side, int8")
    plain = choose_compute(load, AUTO, None)
    assert compute.loaded.weights_bytes < 0.6 * plain.loaded.weights_bytes
    similar = torch.cosine_similarity(vectors(compute), vectors(plain))
    assert 0.99 < float(similar.min()) < 1 - 1e-6
    with pytest.raises(BackendUnavailable, match="quantization int8: BertModel runs with torch"):
        choose_compute(load, TORCH, None, is_int8=True)
