"""Rows with adapters, computed by a model that serves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_service.device import KVCache
from executor_service.model import (
    Adapter,
    LoadedModel,
    MakeModel,
    PagedModel,
    build_input_batch,
    torch_model,
)
from tests.support.steps.step_driver import Row, make_step

BLOCK_SIZE, NUM_BLOCKS = 4, 40
BLOCKS_OF_ROW = 3
# Of float32 logits, relative to the largest.
TOLERANCE = 1e-5
TOKENS = [5, 17, 42, 9, 71, 23]


class Served:
    """A loaded model with adapters, on pools of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        adapters: Mapping[str, Adapter],
        make_model: MakeModel = torch_model,
    ) -> None:
        self.loaded = loaded
        self.adapters = adapters
        cache = KVCache(loaded.layers, BLOCK_SIZE, NUM_BLOCKS, 0, loaded.dtype, loaded.device)
        self.model: PagedModel = make_model(loaded, cache)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Returns the logits of the last token of each row, [R, V]."""
        device = self.loaded.device
        step, indexes = make_step(rows), list(range(len(rows)))
        batch = build_input_batch(step, indexes, BLOCK_SIZE, device, adapters=self.adapters)
        with torch.inference_mode():
            return self.model.logits(batch).clone()

    def last_logits(self, texts: Sequence[Sequence[int]], names: Sequence[str]) -> Tensor:
        """Returns the logits of the last two tokens of each text, [R, 2, V].

        The texts run together, each with the adapter that `names` has for it: first as prompts
        without their last tokens, then as decodes.
        """
        prompts, decodes = [], []
        for index, (tokens, name) in enumerate(zip(texts, names, strict=True)):
            table = [index * BLOCKS_OF_ROW + block for block in range(BLOCKS_OF_ROW)]
            prompts.append(Row(tokens[:-1], 0, table, len(tokens), adapter=name))
            decodes.append(Row(tokens[-1:], len(tokens) - 1, table, len(tokens), adapter=name))
        return torch.stack([self.logits(prompts), self.logits(decodes)], dim=1)


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference, relative to the largest logit."""
    return float((actual - expected).abs().max() / expected.abs().max())


def plain_model(folder: Path) -> Any:  # noqa: ANN401
    """Returns the model of `transformers` in `folder`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval()
