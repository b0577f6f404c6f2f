"""The choice among GPU backends, played with plain torch on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_service.backends.attention_candidates import CANDIDATES, Candidate, WhyNotLayer
from executor_service.backends.attention_trial import time_attention
from executor_service.backends.choose import AUTO, NATIVE, TORCH
from executor_service.backends.gpu import choose_gpu_attention
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.device.kv_cache import LayerShape
from executor_service.errors import BackendUnavailable, TrialFailed
from executor_service.model.loaded_model import LoadedModel
from splitserve_kernels import reference
from splitserve_kernels.gpu.attention.flash_attention_rules import why_not_flash_attention
from splitserve_kernels.paged_batch import AttentionBackend, AttentionOptions, PagedBatch
from splitserve_options.table import OPTIONS
from tests.support.models.tiny_models import make_tiny_model


class _Right:
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)


class _Wrong(_Right):
    @staticmethod
    def paged_attention(
        query: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
        batch: PagedBatch,
        options: AttentionOptions,
    ) -> Tensor:
        return reference.paged_attention(query, key_pool, value_pool, batch, options) + 1


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_model(ModelConfig(str(directory)))


def _candidate(
    name: str,
    block_size: int,
    make: Callable[[], AttentionBackend] = _Right,
    absent: str | None = None,
    why_not_layer: WhyNotLayer = lambda _layer, _options, _dtype, _size: None,
) -> Candidate:
    return Candidate(name, block_size, make, lambda: absent, why_not_layer)


def _coarse_only(
    _layer: LayerShape, _options: AttentionOptions, _dtype: torch.dtype, block_size: int
) -> str | None:
    return None if block_size % 256 == 0 else f"block_size {block_size}: multiples of 256 only"


FINE = _candidate("fine", 16)
COARSE = _candidate("coarse", 256, why_not_layer=_coarse_only)


def _never(_backend: AttentionBackend, _loaded: LoadedModel, _size: int) -> float:
    raise AssertionError("nothing is to be timed")


def _seconds(fine: float, coarse: float) -> Callable[[AttentionBackend, LoadedModel, int], float]:
    times = iter((fine, coarse))
    return lambda _backend, _loaded, _size: next(times)


@pytest.mark.parametrize(
    ("fine_s", "coarse_s", "chosen"),
    [(1.0, 2.0, "fine"), (1.0, 0.9, "fine"), (1.0, 0.7, "coarse")],
)
def test_choose_gpu_attention_takes_coarse_blocks_when_they_are_much_faster(
    loaded: LoadedModel, fine_s: float, coarse_s: float, chosen: str
) -> None:
    seconds = _seconds(fine_s, coarse_s)
    choice = choose_gpu_attention(loaded, None, None, (FINE, COARSE), seconds)
    assert (choice.name, choice.block_size) == (chosen, {"fine": 16, "coarse": 256}[chosen])


def test_choose_gpu_attention_takes_the_fastest_when_the_block_size_is_given(
    loaded: LoadedModel,
) -> None:
    choice = choose_gpu_attention(loaded, None, 256, (FINE, COARSE), _seconds(1.0, 0.99))
    assert (choice.name, choice.block_size) == ("coarse", 256)


def _fail(_backend: AttentionBackend, _loaded: LoadedModel, _size: int) -> float:
    raise RuntimeError("out of memory")


def test_choose_gpu_attention_takes_the_default_when_timing_fails(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose_gpu_attention(loaded, None, None, (FINE, COARSE), _fail)
    assert choice.name == "fine"
    assert "attention_backends_not_timed reason='out of memory'" in caplog.text


def test_choose_gpu_attention_takes_who_can_when_the_block_size_is_fine(
    loaded: LoadedModel,
) -> None:
    choice = choose_gpu_attention(loaded, None, 32, (FINE, COARSE), _never)
    assert (choice.name, choice.block_size) == ("fine", 32)


def test_choose_gpu_attention_raises_when_the_only_one_cannot_do_the_block_size(
    loaded: LoadedModel,
) -> None:
    with pytest.raises(BackendUnavailable, match="block_size 16: multiples of 256 only"):
        choose_gpu_attention(loaded, "coarse", 16, (FINE, COARSE), _never)


def test_choose_gpu_attention_takes_its_block_size_when_only_one_may_be_taken(
    loaded: LoadedModel,
) -> None:
    choice = choose_gpu_attention(loaded, "coarse", None, (FINE, COARSE), _never)
    assert (choice.name, choice.block_size) == ("coarse", 256)


def test_choose_gpu_attention_says_an_error_and_takes_the_next_when_one_is_wrong(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = _candidate("fine", 16, _Wrong)
    choice = choose_gpu_attention(loaded, None, None, (wrong, COARSE), _never)
    assert choice.name == "coarse"
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "attention_backend_refused backend=fine" in errors[0]


def test_choose_gpu_attention_raises_what_is_worse_when_none_can_serve(
    loaded: LoadedModel,
) -> None:
    wrong = _candidate("fine", 16, _Wrong)
    missing = _candidate("missing", 256, absent="it is not installed")
    for candidates in ((wrong, missing), (missing, wrong)):
        with pytest.raises(TrialFailed, match="differs"):
            choose_gpu_attention(loaded, None, None, candidates, _never)
    with pytest.raises(BackendUnavailable, match="it is not installed"):
        choose_gpu_attention(loaded, None, None, (missing,), _never)


def test_candidates_are_what_the_option_takes_when_it_names_a_backend() -> None:
    option = next(option for option in OPTIONS if option.key == "attention_backend")
    assert set(option.choices) == {AUTO, TORCH, NATIVE, *(each.name for each in CANDIDATES)}


@pytest.fixture
def flash_attention_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "executor_service.backends.attention_candidates"
    for name in ("why_no_flash_attention", "why_no_flash_attention_3", "why_unavailable"):
        monkeypatch.setattr(f"{module}.{name}", lambda: None)


def _named(name: str) -> Candidate:
    return next(candidate for candidate in CANDIDATES if candidate.name == name)


@pytest.mark.usefixtures("flash_attention_is_here")
def test_candidates_pass_the_sinks_on_when_a_model_has_them(tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(str(make_tiny_model("gpt_oss", tmp_path)), dtype="bfloat16"))
    assert _named("flash-attn").why_not(loaded, 256) == why_not_flash_attention(
        (16, 16), loaded.dtype, 256, has_sinks=True
    )
    reason = _named("flash-attn-3").why_not(loaded, 16)
    assert reason == "attention sinks: flash-attn 3 has none"


@pytest.mark.usefixtures("flash_attention_is_here")
@pytest.mark.parametrize(("name", "block_size"), [("flash-attn", 256), ("flash-attn-3", 16)])
def test_candidates_refuse_flash_attention_when_keys_and_values_have_8_bits(
    name: str, block_size: int, loaded: LoadedModel
) -> None:
    narrow = replace(loaded, kv_dtype=torch.float8_e4m3fn)
    reason = _named(name).why_not(narrow, block_size)
    assert reason == f"{name} takes no float8_e4m3fn keys and values"


@pytest.mark.usefixtures("flash_attention_is_here")
def test_candidates_pass_the_window_on_when_a_model_has_one(loaded: LoadedModel) -> None:
    options = [replace(each, sliding_window=20) for each in loaded.layer_options]
    half = replace(
        loaded,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        layer_options=tuple(options),
    )
    candidate = _named("flash-attn-3")
    assert candidate.why_not(half, 16) is None
    assert candidate.why_not(half, 32) == (
        "a sliding window of 20 in blocks of 32: allowed: a block or more"
    )


def test_time_attention_takes_time(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant, number in (
        ("_NUM_TIMED_COMPUTED", 20),
        ("_NUM_TIMED_PROMPT_TOKENS", 8),
        ("_NUM_RUNS", 1),
    ):
        monkeypatch.setattr(f"executor_service.backends.attention_trial.{constant}", number)
    assert time_attention(reference, loaded, 16) > 0
