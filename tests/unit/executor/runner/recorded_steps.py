"""Steps, and a model whose steps are recorded, for the tests of recordings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from executor_service.device import KVCache, Recorder
from executor_service.model import InputBatch, LoadedModel, MakeModel, PagedModel, build_input_batch
from executor_service.runner import RecordedModels, decode_shapes, prompt_shapes
from executor_service.sampling import StaticDraw
from tests.support.devices.recorded_ops import static_model
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_NUM_ROWS, MAX_NUM_TOKENS = 6, 20
SHAPES = decode_shapes(MAX_NUM_ROWS) + prompt_shapes(MAX_NUM_ROWS, MAX_NUM_TOKENS)
TABLE_WIDTH = 15
# Of float32 logits of about 10; a matrix product may depend on how many rows there are.
TOLERANCE = 1e-4


def cache_of(loaded: LoadedModel) -> KVCache:
    """Empty pools."""
    return KVCache(loaded.layers, BLOCK_SIZE, NUM_BLOCKS, 0, loaded.dtype, loaded.device)


def recorded_models(
    make_model: MakeModel,
    make_recorder: Callable[[], Recorder],
    static_draw: StaticDraw | None = None,
    max_num_tokens: int = 0,
) -> RecordedModels:
    """Of decodes, and of prompts if there may be tokens of them."""
    return RecordedModels(make_model, MAX_NUM_ROWS, max_num_tokens, static_draw, make_recorder)


def logits_of(model: PagedModel, rows: list[Row]) -> Tensor:
    """Of a step of `rows`, [L, V]."""
    step = make_step(rows)
    batch = build_input_batch(step, list(range(len(rows))), BLOCK_SIZE, torch.device("cpu"))
    with torch.inference_mode():
        return model.logits(batch).clone()


def random_decodes(generator: random.Random, num_rows: int, *, samples: bool = True) -> list[Row]:
    """Rows of one token, each with blocks of its own."""
    free = list(range(NUM_BLOCKS))
    generator.shuffle(free)
    rows = []
    for _ in range(num_rows):
        computed = generator.randrange(24)
        table = [free.pop() for _ in range(computed // BLOCK_SIZE + generator.randint(1, 2))]
        token = generator.randrange(3, 150)
        rows.append(Row([token], computed, table, 1, samples or generator.random() < 0.5))
    return rows


def random_mixture(generator: random.Random, num_decodes: int, lengths: Sequence[int]) -> list[Row]:
    """Decodes, and rows of several tokens behind some that are computed, in any order."""
    rows = random_decodes(generator, num_decodes, samples=False)
    free = [i for i in range(NUM_BLOCKS) if all(i not in row.block_table for row in rows)]
    for length in lengths:
        computed = generator.randrange(7)
        table = [free.pop() for _ in range(-(-(computed + length) // BLOCK_SIZE))]
        tokens = [generator.randrange(3, 150) for _ in range(length)]
        rows.append(Row(tokens, computed, table, 30, generator.random() < 0.5))
    generator.shuffle(rows)
    return rows


class Turns:
    """Two models in turns: attention of a loaded model is bound to the one that was made last."""

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        self._loaded, self._cache = loaded, cache

    def logits(self, batch: InputBatch) -> Tensor:
        return static_model(self._loaded, self._cache).logits(batch)
