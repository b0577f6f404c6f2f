from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.config import ExecutorConfig
from executor_service.engine_loader import load_engine
from executor_service.model.loaded_model import LoadedModel
from executor_service.runner.pool_sizes import StepSize
from executor_service.steps.drafts import MAX_NUM_DRAFTS
from executor_service.steps.executor_info import DefaultSampling, Feature
from splitserve_kernels.paged_batch import KVScales
from splitserve_options import options
from tests.support.models.tiny_models import make_tiny_model


@pytest.mark.usefixtures("native_library")
def test_load_engine_announces_another_model_when_its_weights_are_rounded() -> None:
    digests = []
    for quantization in ("none", "int8"):
        values = options.parse("executor", ["--num-device-blocks", "4"], {})
        config = ExecutorConfig.from_options({**values, "quantization": quantization})
        engine = load_engine(config, executor_epoch=1)
        digests.append(engine.info.model.digest)
        assert ("int8" in engine.compute) == (quantization == "int8")
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert digests[0] != digests[1]


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
        arguments = ["--num-device-blocks=4", "--attention-backend=torch", "--device=cpu"]
        config = ExecutorConfig.from_options(options.parse("executor", arguments, {}))
        digests.add(load_engine(config, executor_epoch=1).info.model.digest)
    assert len(digests) == 3


def test_load_engine_announces_what_the_models_authors_recommend(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 20}')
    flags = ["--model", str(tmp_path), "--num-device-blocks=4", "--attention-backend=torch"]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    engine = load_engine(config, executor_epoch=1)
    assert engine.info.model.default_sampling == DefaultSampling(temperature=0.5, top_k=20)


def test_load_engine_announces_a_step_that_it_has_measured(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    flags = ["--model", str(tmp_path), "--num-device-blocks=4", "--attention-backend=torch"]
    config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
    trial = load_engine(config, executor_epoch=1).info.trial_step
    assert trial is not None
    assert trial.num_tokens == 16


def test_load_engine_leaves_room_for_the_drafts_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("llama", tmp_path)
    num_rows: list[int] = []

    def measure(size: StepSize, *_: object) -> int:
        num_rows.append(size.num_rows)
        return 0

    monkeypatch.setattr("executor_service.runner.pool_sizes.measure_worst_step", measure)
    flags = ["--model", str(tmp_path), "--memory-fraction=0.001", "--max-num-seqs=3"]
    config = ExecutorConfig.from_options(
        options.parse("executor", [*flags, "--attention-backend=torch"], {})
    )
    load_engine(config, executor_epoch=1)
    assert num_rows == [3 + MAX_NUM_DRAFTS]


def test_load_engine_announces_grammars_when_the_tokenizer_is_there(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    for model, has_tokenizer in (("bundled", True), (str(tmp_path), False)):
        flags = ["--model", model, "--num-device-blocks=4", "--attention-backend=torch"]
        config = ExecutorConfig.from_options(options.parse("executor", flags, {}))
        engine = load_engine(config, executor_epoch=1)
        assert (Feature.GRAMMAR in engine.info.features) == has_tokenizer
        assert (engine.grammars is not None) == has_tokenizer
