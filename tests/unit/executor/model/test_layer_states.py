"""Models show what is between their layers, and say the same meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from executor_service.backends.choose import choose_compute
from executor_service.checkpoint.model_loader import ModelConfig, load_model
from executor_service.errors import ModelUnsupported
from executor_service.model.paged_model import LayerStates, RevealingModel
from executor_service.runner.pool_sizes import CacheConfig, build_runner
from tests.support.models.tiny_heads import LAYER_IDS, states_of
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 8
TABLES = [[5, 2, 9], [3, 7, 0]]
LENGTHS = (20, 17)


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [("llama", "torch"), ("gpt_neox", "native"), ("llama", "native"), ("qwen3", "native")],
)
def test_model_reveals_what_layers_are_given_when_tokens_come_in_parts(
    tmp_path: Path, architecture: str, backend: str
) -> None:
    directory = make_tiny_model(architecture, tmp_path, seed=2)
    compute = choose_compute(lambda: load_model(ModelConfig(str(directory))), backend, BLOCK_SIZE)
    pools = CacheConfig(BLOCK_SIZE, 10, 0)
    runner = build_runner(compute.loaded, pools, compute.make_model, compute.draw)
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    # Prompts and decodes, side by side and alone.
    parts = [((0, 7), (0, 16)), ((7, 8), (16, 17)), ((8, 20), (0, 0))]

    def sampled() -> list[int]:
        tokens = []
        for spans in parts:
            rows = [
                Row(text[start:end], start, table, len(text))
                for text, table, (start, end) in zip(texts, TABLES, spans, strict=True)
                if end > start
            ]
            tokens += runner.execute(make_step(rows)).sampled_token_ids.tolist()
        return tokens

    before = sampled()
    assert isinstance(runner.model, RevealingModel)
    revealed: dict[int, Tensor] = {}
    runner.model.reveal(
        LAYER_IDS,
        lambda states, slots: revealed.update(
            zip(slots.tolist(), states.clone().unbind(1), strict=True)
        ),
    )
    assert sampled() == before
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for text, table in zip(texts, TABLES, strict=True):
        expected, embedded = _states(model, torch.tensor([text]))
        positions = range(len(text))
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        of_text = torch.stack([revealed[slot].flatten() for slot in slots])
        torch.testing.assert_close(of_text, expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(runner.model.embed(torch.tensor(text)), embedded[0])


def _states(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    if not hasattr(model, "gpt_neox"):
        return states_of(model, tokens)
    # The same names for the parts that are looked at.
    model.model = model.gpt_neox
    return states_of(model, tokens)


def test_layer_states_refuse_what_is_no_stack_of_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ModelUnsupported, match="Sequential: its layers are not one stack"):
        LayerStates(model, [model[0]], [0])
