from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from executor_service.backends import TRIALS_VARIABLE
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from executor_service.model import LoadedModel
from executor_service.runner import StepSize
from executor_service.steps import MAX_NUM_DRAFTS, SAMPLING_FEATURES, DefaultSampling, Feature
from splitserve_kernels.paged_batch import KVScales
from tests.support.models.tiny_models import SLIDING_WINDOW, load_engine_of, make_tiny_model

# Nothing is measured, compiled or tried.
PLAIN = ("--num-device-blocks=4", "--attention-backend=torch", "--device=cpu")


@pytest.mark.usefixtures("native_library")
def test_load_engine_announces_another_model_when_its_weights_are_rounded() -> None:
    digests = set()
    for quantization in ("none", "int8", "fp8"):
        engine = load_engine_of("--num-device-blocks=4", f"--quantization={quantization}")
        digests.add(engine.info.model.digest)
        assert ("int8" in engine.compute) == (quantization == "int8")
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert len(digests) == 3


def test_load_engine_announces_another_model_when_its_keys_have_other_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = set()
    for scale in (None, 1.0, 0.5):

        def load(config: ModelConfig, scale: float | None = scale) -> LoadedModel:
            loaded = load_model(config)
            scales = () if scale is None else (KVScales(scale, 1.0),) * len(loaded.layers)
            return replace(loaded, kv_scales=scales)

        monkeypatch.setattr("executor_service.engine_loader.load_model", load)
        digests.add(load_engine_of(*PLAIN).info.model.digest)
    assert len(digests) == 3


def test_load_engine_announces_recommendations_and_a_measured_step(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    info = load_engine_of(f"--model={tmp_path}", *PLAIN).info
    assert info.model.default_sampling == DefaultSampling(temperature=0.5, top_k=20)
    assert info.trial_step is not None
    assert info.trial_step.num_tokens == 16
    assert info.model.kv_cache_dtype == info.model.dtype


def test_load_engine_leaves_room_for_the_drafts_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("llama", tmp_path)
    num_rows: list[int] = []

    def measure(size: StepSize, *_: object) -> int:
        num_rows.append(size.num_rows)
        return 0

    monkeypatch.setattr("executor_service.runner.pool_sizes.measure_worst_step", measure)
    limits = ("--memory-fraction=0.001", "--max-num-seqs=3")
    load_engine_of(f"--model={tmp_path}", *limits, "--attention-backend=torch")
    assert num_rows == [3 + MAX_NUM_DRAFTS]


def test_load_engine_announces_grammars_when_the_tokenizer_is_there(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    for model, has_tokenizer in (("bundled", True), (str(tmp_path), False)):
        engine = load_engine_of(f"--model={model}", *PLAIN)
        assert (Feature.GRAMMAR in engine.info.features) == has_tokenizer
        assert (engine.grammars is not None) == has_tokenizer


def test_load_engine_announces_the_window_and_features_of_the_model(tmp_path: Path) -> None:
    make_tiny_model("mistral", tmp_path)
    info = load_engine_of(f"--model={tmp_path}", "--num-device-blocks=8").info
    assert info.model.sliding_window == SLIDING_WINDOW
    assert info.features == SAMPLING_FEATURES | {
        Feature.SEVERAL_TOKENS,
        Feature.PARTIAL_RESULTS,
        Feature.ADAPTERS,
    }
    assert info.limits.max_adapters_per_step == 8
    assert info.adapter_support is not None
    assert (info.adapter_support.max_num_loaded, info.adapter_support.max_rank) == (8, 64)
    assert {"q_proj", "down_proj", "lm_head"} <= set(info.adapter_support.target_modules)


def test_load_engine_announces_no_adapters_when_none_are_wanted(tmp_path: Path) -> None:
    make_tiny_model("mistral", tmp_path)
    info = load_engine_of(f"--model={tmp_path}", *PLAIN, "--max-adapters=0").info
    assert Feature.ADAPTERS not in info.features
    assert info.limits.max_adapters_per_step is None
    assert info.adapter_support is None


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_load_engine_describes_the_same_model_when_it_was_tried_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    monkeypatch.setenv(TRIALS_VARIABLE, str(tmp_path))
    flags = ("--num-device-blocks=8", f"--kv-cache-dtype={kv_cache_dtype}")
    first = load_engine_of(*flags)
    monkeypatch.setattr("executor_service.engine_loader.load_model", _never)
    second = load_engine_of(*flags)
    assert replace(second.info, trial_step=None) == replace(first.info, trial_step=None)
    assert (second.compute, second.architecture) == (first.compute, first.architecture)
    assert second.tokenizer_files == first.tokenizer_files
    assert second.grammars is not None
    with pytest.raises(AssertionError):
        load_engine_of("--num-device-blocks=8", "--draft-model=bundled")


def _never(_: ModelConfig) -> NoReturn:
    raise AssertionError("the model was tried before")


def test_load_model_refuses_int8_keys_and_values_when_on_a_gpu() -> None:
    with pytest.raises(
        ModelUnsupported, match="kv_cache_dtype int8: not for cuda; allowed: auto, fp8"
    ):
        load_model(ModelConfig(model="any", device="cuda", kv_cache_dtype="int8"))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("option", "name"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_load_engine_names_the_kv_dtype_when_keys_and_values_are_codes(
    option: str, name: str, backend: str
) -> None:
    flags = ("--num-device-blocks=8", "--dtype=bfloat16", f"--attention-backend={backend}")
    plain = load_engine_of(*flags)
    engine = load_engine_of(*flags, f"--kv-cache-dtype={option}")
    assert engine.info.model.kv_cache_dtype == name
    assert engine.info.model.digest != plain.info.model.digest
