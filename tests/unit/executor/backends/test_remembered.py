from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_service.backends import (
    AUTO,
    TORCH,
    Compute,
    ComputeDemand,
    TrialCache,
    choose_compute,
    recall_compute,
)
from executor_service.checkpoint import ModelConfig, load_model
from executor_service.decoders import rotation_at
from executor_service.model import LoadedModel
from tests.support.models.model_pair import served_logits
from tests.support.models.tiny_models import (
    MAX_POSITION_EMBEDDINGS,
    edit_json,
    make_tiny_model,
)

BLOCK_SIZE = 8
PROMPT = [(11 * i + 5) % 90 for i in range(45)]
DEMAND = ComputeDemand(AUTO, BLOCK_SIZE, is_deterministic=False, is_int8=False)
TRIALS = "executor_service.backends.trial_cache"

pytestmark = pytest.mark.usefixtures("native_library")


@dataclass(slots=True)
class Start:
    """Starts with the same cache. `num_loads`: how often `transformers` has loaded a model."""

    cache: TrialCache
    num_loads: int = 0
    demand: ComputeDemand = field(default=DEMAND)
    max_model_len: int | None = None

    def __call__(self, directory: Path, dtype: str = "auto") -> Compute:
        config = ModelConfig(
            str(directory), dtype=dtype, keeps_packed=True, max_model_len=self.max_model_len
        )

        def load() -> LoadedModel:
            self.num_loads += 1
            return load_model(config)

        def choose(load: Any) -> Compute:  # noqa: ANN401
            demand = self.demand
            return choose_compute(load, demand.backend, demand.block_size, is_int8=demand.is_int8)

        return recall_compute(self.cache, config, self.demand, load, choose)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(TrialCache(tmp_path / "trials"))


def logits_of(compute: Compute) -> torch.Tensor:
    return served_logits(compute.loaded, compute.make_model, PROMPT, BLOCK_SIZE, [7])


@pytest.mark.parametrize(
    ("architecture", "dtype", "overrides"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.bfloat16, {"tie_word_embeddings": True}),
        ("llama", torch.float32, {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", torch.bfloat16, {}),
        ("mistral", torch.float32, {}),
        (
            "llama",
            torch.bfloat16,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_recall_compute_needs_no_transformers_when_the_model_was_tried(
    architecture: str,
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
    tmp_path: Path,
    start: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = make_tiny_model(architecture, tmp_path / "model", 1, overrides, dtype)
    edit_json(directory / "generation_config.json", temperature=0.5, eos_token_id=[3, 4])
    first = start(directory)
    assert first.description.startswith("native decoder")
    with caplog.at_level(logging.INFO):
        second = start(directory)
    assert start.num_loads == 1
    assert any(message.startswith("trials_remembered") for message in caplog.messages)
    # What the first computes was tried against transformers.
    assert torch.equal(logits_of(first), logits_of(second))
    parts: dict[str, Any] = {
        "model": None, "attention_modules": (), "base_tensor": None, "tokenizer_files": {},
    }  # fmt: skip
    assert replace(first.loaded, **parts) == replace(second.loaded, **parts)
    assert first.loaded.tokenizer_files == second.loaded.tokenizer_files
    assert (first.description, first.is_batch_invariant) == (
        second.description,
        second.is_batch_invariant,
    )
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        own, recalled = first.loaded.base_tensor(name), second.loaded.base_tensor(name)
        assert own is not None
        assert recalled is not None
        assert torch.equal(own, recalled)
    config, plain = (vars(each.loaded.model.config) for each in (first, second))
    assert plain["num_attention_heads"] == config["num_attention_heads"]


def test_recall_compute_keeps_apart_what_options_change(tmp_path: Path, start: Start) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")
    plain = start(directory)
    start.demand = replace(DEMAND, is_int8=True)
    rounded = start(directory)
    assert start.num_loads == 2
    again = start(directory)
    assert start.num_loads == 2
    assert torch.equal(logits_of(again), logits_of(rounded))
    assert not torch.equal(logits_of(again), logits_of(plain))
    assert again.is_int8
    assert again.description == rounded.description
    start.demand = DEMAND
    assert start(directory, "bfloat16").loaded.dtype == torch.bfloat16
    assert start.num_loads == 3


@pytest.mark.parametrize("changed", ["code_digest", "cpu_digest", "weights", "config"])
def test_recall_compute_tries_again_when_something_has_changed(
    changed: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")
    first = start(directory)
    if changed == "weights":
        make_tiny_model("llama", directory, seed=5)
    elif changed == "config":
        edit_json(directory / "config.json", rms_norm_eps=0.5)
    else:
        monkeypatch.setattr(f"{TRIALS}.{changed}", lambda: "other")
    second = start(directory)
    assert start.num_loads == 2
    assert torch.equal(logits_of(first), logits_of(second)) == changed.endswith("digest")


def test_recall_compute_tries_again_when_the_answer_is_another(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")
    weights = directory / "model.safetensors"
    expected = logits_of(start(directory))
    key = next(start.cache.directory.iterdir()).stem
    facts = start.cache.read(key)
    assert facts is not None
    start.cache.write(key, {**facts, "epsilon": 0.5})
    assert torch.equal(logits_of(start(directory)), expected)
    assert start.num_loads == 2
    assert any(
        message.startswith("trials_repeated model=model reason=") for message in caplog.messages
    )
    # Only the time of the file would tell; it is set back.
    times = os.stat(weights)
    start(directory)
    assert start.num_loads == 2
    content = bytearray(weights.read_bytes())
    content[-200:] = bytes(200)
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    start(directory)
    assert start.num_loads == 3


def test_recall_compute_tries_again_when_its_file_is_damaged(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")
    start(directory)
    path = next(start.cache.directory.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    start(directory)
    assert start.num_loads == 2
    assert any(message.startswith("trials_not_read") for message in caplog.messages)
    start(directory)
    assert start.num_loads == 2


def test_recall_compute_remembers_no_model_that_the_decoder_does_not_run(
    tmp_path: Path, start: Start
) -> None:
    start(make_tiny_model("gpt_neox", tmp_path / "neox"))
    start(make_tiny_model("llama", tmp_path / "half", dtype=torch.float16))
    long = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    start.max_model_len = 2 * MAX_POSITION_EMBEDDINGS
    # Each start warns of the changed angles.
    start(make_tiny_model("llama", tmp_path / "long", overrides={"rope_parameters": long}))
    start.max_model_len = None
    start.demand = replace(DEMAND, backend=TORCH)
    start(make_tiny_model("llama", tmp_path / "llama"))
    assert not start.cache.directory.exists()


def test_recall_compute_remembers_no_model_with_other_angles(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")

    def other_angles(loaded: LoadedModel, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(1.01 * each for each in rotation_at(loaded, positions))

    monkeypatch.setattr("executor_service.backends.remembered.rotation_at", other_angles)
    with caplog.at_level(logging.INFO):
        start(directory)
    assert not start.cache.directory.exists()
    assert any(message.startswith("trials_not_remembered") for message in caplog.messages)
