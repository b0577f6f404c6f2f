"""A head computes on blocks what it computes in plain torch, however its tokens come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_service.backends.choose import LayerCompute, choose_layer_compute
from executor_service.checkpoint.folder import resolve_checkpoint
from executor_service.device.kv_cache import KVCache, LayerShape
from executor_service.model.input_batch import build_input_batch
from executor_service.model.loaded_model import LayerKind
from executor_service.speculation.eagle3.head_model import HeadModel, HeadStates, states_shape
from executor_service.speculation.eagle3.head_weights import read_head_config, read_head_weights
from splitserve_kernels.paged_batch import AttentionOptions
from tests.support.models.tiny_heads import TINY_SHAPE, make_tiny_head, random_head
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 8
NUM_TOKENS = 700
DEPTH = 3
LAYER = LayerShape(2, 16, 16)
KIND = LayerKind(LAYER, 4, AttentionOptions(16**-0.5))


class _Headed:
    """A head on pools, with the states of a text of NUM_TOKENS in its blocks."""

    def __init__(
        self, directory: Path, compute: LayerCompute, embedding: Tensor, states: Tensor
    ) -> None:
        checkpoint = resolve_checkpoint(str(make_tiny_head(directory, seed=3)))
        config = read_head_config(checkpoint.directory, checkpoint.config)
        weights = read_head_weights(checkpoint.weight_files, config, torch.float32)
        num_blocks = -(-NUM_TOKENS // BLOCK_SIZE)
        shapes = [LAYER, states_shape(config.width)]
        device = torch.device("cpu")
        cache = KVCache(shapes, BLOCK_SIZE, num_blocks, 0, torch.float32, device)
        self.table = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.states = HeadStates(cache.key_pools[1], compute.linear(weights.fc))
        self.model = HeadModel(config, weights, compute, embedding.__getitem__, cache, self.states)
        self.show(states, 0)

    def show(self, states: Tensor, position: int) -> None:
        """The model's states [L, 3 W] are these, from `position` on."""
        positions = torch.arange(position, position + len(states))
        slots = torch.tensor(self.table)[positions // BLOCK_SIZE] * BLOCK_SIZE
        self.states.take(
            states.view(len(states), 3, -1).transpose(0, 1), slots + positions % BLOCK_SIZE
        )

    def logits(self, tokens: list[int], position: int, *, samples: bool) -> Tensor:
        row = Row(tokens, position, self.table, 1, samples)
        batch = build_input_batch(make_step([row]), [0], BLOCK_SIZE, torch.device("cpu"))
        with torch.inference_mode():
            return self.model.logits(batch)


@pytest.fixture(params=["torch", "native"])
def compute(request: pytest.FixtureRequest) -> LayerCompute:
    chosen = choose_layer_compute(KIND, torch.float32, request.param, BLOCK_SIZE)
    assert (chosen.description == "torch") == (request.param == "torch")
    return chosen


def test_head_says_what_it_says_in_plain_torch(tmp_path: Path, compute: LayerCompute) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TINY_SHAPE.vocab_size, (NUM_TOKENS,), generator=generator)
    states = torch.randn(NUM_TOKENS, 3 * TINY_SHAPE.target_width, generator=generator)
    embedding = torch.randn(TINY_SHAPE.vocab_size, TINY_SHAPE.width, generator=generator)
    head = random_head(TINY_SHAPE, 3)
    with torch.inference_mode():
        expected = head(states[None, :-1], embedding[tokens][None, 1:], DEPTH)
    headed = _Headed(tmp_path, compute, embedding, states)
    position = 1
    # Parts of the text that are computed without a guess, and how much of it was known then.
    for end in (2, 3, 40, 41, 300, 690):
        if before := tokens[position : end - 1].tolist():
            assert len(headed.logits(before, position, samples=False)) == 0
        for depth in range(DEPTH):
            # What was not the model's yet is overwritten by what it guesses on from.
            said = headed.logits([int(tokens[end - 1 + depth])], end - 1 + depth, samples=True)
            of_head = expected[depth][0, end - 2 + depth]
            torch.testing.assert_close(said[0, head.token_ids], of_head, rtol=1e-3, atol=1e-3)
            assert torch.isneginf(said[0, : TINY_SHAPE.vocab_size // 8]).all()
        headed.show(states[end - 1 : end + DEPTH], end - 1)
        position = end - 1
