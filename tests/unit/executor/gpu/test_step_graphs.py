"""Steps with our kernels, recorded on a GPU and run again where there is none."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_service.checkpoint import ModelConfig, load_model
from executor_service.device import CudaGraphs, KVCache, Recorder
from executor_service.model import LoadedModel, PagedModel, TransformersModel, torch_model
from executor_service.runner import CacheConfig, RecordedModels, build_runner
from executor_service.sampling import SamplingRows
from executor_service.steps import SamplingParams
from tests.support.devices.recorded_ops import RunAgain
from tests.support.models.tiny_models import make_tiny_model
from tests.support.steps.step_driver import DrivenSequence, drive

pytest.importorskip("triton", reason="triton is not installed")

from executor_service.backends.gpu_draw import TritonStaticDraw, triton_draw
from splitserve_kernels.gpu.attention import backend

BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAX_NUM_ROWS, MAX_NUM_TOKENS = 3, 14
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.2, top_k=9, top_p=0.8),
)


def _triton_model(loaded: LoadedModel, cache: KVCache) -> PagedModel:
    return TransformersModel(loaded, cache, backend)


# Gemma's layers take turns at a window.
@pytest.mark.parametrize(("architecture", "num_layers"), [("llama", 1), ("gemma2", 2)])
def test_runner_samples_the_same_tokens_when_our_kernels_are_recorded(
    architecture: str,
    num_layers: int,
    device: torch.device,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    overrides = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    directory = make_tiny_model(architecture, tmp_path, overrides=overrides)
    loaded = load_model(ModelConfig(str(directory), device=device.type, max_model_len=64))

    def make_recorder() -> Recorder:
        return CudaGraphs() if device.type == "cuda" else RunAgain()

    outputs, num_drawn_outside = [], []
    for make_model in (
        torch_model,
        RecordedModels(
            _triton_model, MAX_NUM_ROWS, MAX_NUM_TOKENS, TritonStaticDraw(), make_recorder
        ).make,
    ):
        config = CacheConfig(BLOCK_SIZE, num_device_blocks=NUM_BLOCKS, num_host_blocks=0)
        num_drawn = Counter[str]()

        def count_and_draw(
            logits: Tensor, rows: SamplingRows, num_drawn: Counter[str] = num_drawn
        ) -> Tensor:
            num_drawn["outside"] += 1
            return triton_draw(logits, rows)

        runner = build_runner(loaded, config, make_model, count_and_draw)
        sequences = [
            DrivenSequence(
                [(7 * i + j) % 140 + 3 for j in range(3 + 4 * i)],
                3,
                start_step=2 * i,
                params=PARAMS[i],
                seed=i,
            )
            for i in range(MAX_NUM_ROWS)
        ]
        drive(runner, sequences, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, chunk_size=None)
        outputs.append([sequence.output for sequence in sequences])
        num_drawn_outside.append(num_drawn["outside"])
    assert outputs[0] == outputs[1]
    assert num_drawn_outside[1] == 0 < num_drawn_outside[0]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
