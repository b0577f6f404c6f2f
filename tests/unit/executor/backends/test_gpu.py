"""The choice among GPU backends, played with plain torch on the CPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_service.backends import (
    AUTO,
    NATIVE,
    TORCH,
    Candidate,
    LayerDemand,
    WhyNotLayer,
    choose_gpu_attention,
    gpu_candidates,
    time_attention,
)
from executor_service.errors import BackendUnavailable, TrialFailed
from executor_service.model import LoadedModel
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionBackend
from splitserve_options import OPTIONS
from tests.support.models.tiny_models import load_tiny_model


class _Right:
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)


class _Wrong(_Right):
    @staticmethod
    def paged_attention(query: Tensor, *others: Any) -> Tensor:  # noqa: ANN401
        return reference.paged_attention(query, *others) + 1


def _candidate(
    name: str,
    make: Callable[[], AttentionBackend] = _Right,
    absent: str | None = None,
    why_not_layer: WhyNotLayer = lambda _demand: None,
) -> Candidate:
    return Candidate(name, make, lambda: absent, why_not_layer)


def _coarse_only(demand: LayerDemand) -> str | None:
    size = demand.block_size
    return None if size % 256 == 0 else f"block_size {size}: multiples of 256 only"


FIRST, SECOND = _candidate("first"), _candidate("second")
COARSE = _candidate("coarse", why_not_layer=_coarse_only)


def _never(_backend: AttentionBackend, _loaded: LoadedModel, _size: int) -> float:
    raise AssertionError("nothing is to be timed")


def _seconds(*times_s: float) -> Callable[[AttentionBackend, LoadedModel, int], float]:
    times = iter(times_s)
    return lambda _backend, _loaded, _size: next(times)


@pytest.mark.parametrize(
    ("first_s", "second_s", "chosen"),
    [(1.0, 2.0, "first"), (1.0, 1.0, "first"), (1.0, 0.9, "second")],
)
def test_choose_gpu_attention_takes_the_fastest_when_several_are_right(
    loaded: LoadedModel, first_s: float, second_s: float, chosen: str
) -> None:
    seconds = _seconds(first_s, second_s)
    choice = choose_gpu_attention(loaded, None, None, (FIRST, SECOND), seconds)
    assert (choice.name, choice.block_size) == (chosen, 16)


def _fail(_backend: AttentionBackend, _loaded: LoadedModel, _size: int) -> float:
    raise RuntimeError("out of memory")


def test_choose_gpu_attention_takes_the_default_when_timing_fails(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose_gpu_attention(loaded, None, None, (FIRST, SECOND), _fail)
    assert choice.name == "first"
    assert "attention_backends_not_timed reason='out of memory'" in caplog.text


def test_choose_gpu_attention_obeys_the_block_size_when_it_is_given(loaded: LoadedModel) -> None:
    choice = choose_gpu_attention(loaded, None, 32, (FIRST, COARSE), _never)
    assert (choice.name, choice.block_size) == ("first", 32)
    with pytest.raises(BackendUnavailable, match="block_size 16: multiples of 256 only"):
        choose_gpu_attention(loaded, "coarse", 16, (FIRST, COARSE), _never)


def test_choose_gpu_attention_takes_large_blocks_only_when_they_are_asked_for(
    loaded: LoadedModel,
) -> None:
    coarse = replace(COARSE, block_size=256)
    for name, size, chosen in (
        (None, None, ("first", 16)),
        ("coarse", None, ("coarse", 256)),
        (None, 256, ("coarse", 256)),
    ):
        choice = choose_gpu_attention(loaded, name, size, (FIRST, coarse), _seconds(2.0, 1.0))
        assert (choice.name, choice.block_size) == chosen


def test_choose_gpu_attention_takes_the_next_when_one_is_wrong(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = _candidate("wrong", _Wrong)
    choice = choose_gpu_attention(loaded, None, None, (wrong, SECOND), _never)
    assert choice.name == "second"
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "attention_backend_refused backend=wrong" in errors[0]


def test_choose_gpu_attention_raises_what_is_worse_when_none_can_serve(
    loaded: LoadedModel,
) -> None:
    wrong = _candidate("wrong", _Wrong)
    missing = _candidate("missing", absent="it is not installed")
    for candidates in ((wrong, missing), (missing, wrong)):
        with pytest.raises(TrialFailed, match="differs"):
            choose_gpu_attention(loaded, None, None, candidates, _never)
    with pytest.raises(BackendUnavailable, match="it is not installed"):
        choose_gpu_attention(loaded, None, None, (missing,), _never)


def test_choose_gpu_attention_warns_when_the_wanted_backend_is_missing(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    missing = _candidate("missing", absent="it is not to be had")
    for is_asked_for, level in ((False, logging.INFO), (True, logging.WARNING)):
        caplog.clear()
        candidate = replace(missing, is_asked_for=is_asked_for)
        assert (
            choose_gpu_attention(loaded, None, None, (candidate, SECOND), _never).name == "second"
        )
        assert [record.levelno for record in caplog.records] == [level]


def test_candidates_are_what_the_option_takes_when_it_names_a_backend() -> None:
    option = next(option for option in OPTIONS if option.key == "attention_backend")
    assert set(option.choices) == {AUTO, TORCH, NATIVE, *(each.name for each in gpu_candidates())}


_TRIAL = "executor_service.backends.attention_candidates"


def test_candidates_warn_of_flash_attention_3_when_its_source_is_given() -> None:
    assert [each.is_asked_for for each in gpu_candidates()] == [False, False, False]
    assert gpu_candidates("hub")[0].is_asked_for


def test_candidates_load_nothing_when_the_device_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(f"{_TRIAL}.load_flash_attention_3", _fail)
    monkeypatch.setattr(f"{_TRIAL}.load_flash_attention_2", _fail)
    reasons = [each.why_not(loaded, 16) for each in gpu_candidates("hub")]
    assert reasons == [
        "flash-attn 3 requires compute capability 8.0 to 9.0",
        None,
        "flash-attn 2 requires compute capability 8.0 or later",
    ]


@pytest.fixture
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.fixture
def flash_attention_3(monkeypatch: pytest.MonkeyPatch, _on_a_hopper: None) -> Candidate:
    """As if it were here."""
    monkeypatch.setattr(f"{_TRIAL}.load_flash_attention_3", lambda _source: None)
    return gpu_candidates()[0]


@pytest.mark.usefixtures("_on_a_hopper")
def test_candidates_say_why_flash_attention_3_is_missing(loaded: LoadedModel) -> None:
    reason = gpu_candidates("/nowhere/_C.so")[0].why_not(loaded, 16)
    assert reason == "flash-attn 3: no such file: /nowhere/_C.so"


def test_candidates_take_flash_attention_3_when_a_model_has_sinks(
    tmp_path: Path, flash_attention_3: Candidate
) -> None:
    loaded = load_tiny_model("gpt_oss", tmp_path, "bfloat16")
    assert loaded.layer_options[0].sinks is not None
    assert flash_attention_3.why_not(loaded, 8) is None


def test_flash_attention_3_is_taken_by_name_only_over_float8(
    loaded: LoadedModel, flash_attention_3: Candidate
) -> None:
    narrow = replace(loaded, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert flash_attention_3.why_not(narrow, 16) is None
    reason = flash_attention_3.why_not(narrow, 16, is_named=False)
    assert reason == (
        "flash-attn-3 rounds queries for float8_e4m3fn keys and values:"
        " used only if requested by name"
    )


def test_candidates_pass_the_window_on_when_a_model_has_one(
    loaded: LoadedModel, flash_attention_3: Candidate
) -> None:
    options = tuple(replace(each, sliding_window=20) for each in loaded.layer_options)
    half = replace(loaded, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, layer_options=options)
    assert flash_attention_3.why_not(half, 16) is None
    assert flash_attention_3.why_not(half, 32) == (
        "a sliding window of 20 with blocks of 32; allowed: a block or more"
    )


@pytest.mark.usefixtures("_on_a_hopper")
def test_candidates_take_flash_attention_2_when_blocks_are_large(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_TRIAL}.load_flash_attention_2", lambda: None)
    candidate = gpu_candidates()[2]
    half = replace(loaded, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert candidate.why_not(half, candidate.block_size) is None
    assert candidate.why_not(half, 16) == "block_size 16: flash-attn 2 supports multiples of 256"


@pytest.mark.usefixtures("_on_a_hopper")
def test_candidates_say_why_flash_attention_2_is_missing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = gpu_candidates()[2].why_not(loaded, 256)
    assert reason is not None
    assert reason.startswith("flash-attn 2 is not installed: ")


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False)])
def test_candidates_refuse_triton_when_the_gpu_cannot_convert_float8(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    is_refused: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    triton = gpu_candidates()[1]
    assert triton.why_not_layer(_demand(loaded, loaded.kv_dtype)) is None
    said = triton.why_not_layer(_demand(loaded, torch.float8_e4m3fn))
    assert (said is not None and "8.9 or later" in said) == is_refused


def _demand(loaded: LoadedModel, kv_dtype: torch.dtype) -> LayerDemand:
    return LayerDemand(loaded.layers[0], loaded.layer_options[0], loaded.dtype, kv_dtype, 16)


def test_time_attention_takes_time(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("COMPUTED", 20), ("PROMPT_TOKENS", 8)):
        monkeypatch.setattr(f"{_TRIAL}._NUM_TIMED_{name}", number)
    monkeypatch.setattr(f"{_TRIAL}._NUM_RUNS", 1)
    assert time_attention(reference, loaded, 16) > 0
