"""Runs a model through paged attention on scratch blocks, to learn how it attends.

Shape letters: Q sequences, L tokens of each, V vocabulary, T tokens of a chunk, H query
heads, G key/value heads, D size of a query or key head, E size of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from executor_service.device.kv_cache import LayerShape
from executor_service.errors import ModelUnsupported
from executor_service.model.transformers_attention import bind, unbind
from splitserve_kernels import reference
from splitserve_kernels.paged_batch import AttentionOptions, PagedBatch, build_paged_batch

SCRATCH_BLOCK_SIZE = 8

# Input tokens [T] and their positions [T] of a batch -> logits [T, V].
Forward = Callable[[Tensor, Tensor, PagedBatch], Tensor]


@dataclass(slots=True)
class ProbeContext:
    """Attends on scratch pools that are made for each module when it first attends.

    `rounding_noise` > 0 changes each output by that ratio, up or down, to show what rounding does.
    """

    num_blocks: int
    rounding_noise: float = 0.0
    pools: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    options: dict[nn.Module, AttentionOptions] = field(default_factory=dict)
    _batch: PagedBatch | None = None
    _attended: set[nn.Module] = field(default_factory=set)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What each module stores per token, in the order of the forward pass."""
        return tuple(
            LayerShape(key.shape[2], key.shape[3], value.shape[3])
            for key, value in self.pools.values()
        )

    def begin_forward(self, batch: PagedBatch) -> None:
        """Sets the batch that the next forward pass is for."""
        self._batch = batch
        self._attended.clear()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Raises ModelUnsupported if `module` attends a second time in one forward pass."""
        assert self._batch is not None, "begin_forward comes before the forward pass"
        if module in self._attended:
            raise ModelUnsupported(f"{type(module).__name__} attends twice in one forward pass")
        self._attended.add(module)
        if module not in self.pools:
            self.pools[module] = (self._new_pool(key), self._new_pool(value))
            self.options[module] = options
        key_pool, value_pool = self.pools[module]
        reference.write_kv(key, value, key_pool, value_pool, self._batch)
        output = reference.paged_attention(query, key_pool, value_pool, self._batch, options)
        if self.rounding_noise:
            # Signs that look random and are the same each time: whether a sine is positive.
            index = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
            signs = torch.sin(index * 12.9898).sign().view(output.shape)
            output = (output * (1 + self.rounding_noise * signs)).to(output.dtype)
        return output

    def _new_pool(self, heads: Tensor) -> Tensor:
        return heads.new_zeros(self.num_blocks, SCRATCH_BLOCK_SIZE, *heads.shape[1:])


def num_scratch_blocks(tokens: Tensor, block_size: int = SCRATCH_BLOCK_SIZE) -> int:
    """Blocks that `run_in_steps` uses for `tokens` [Q, L]."""
    return tokens.shape[0] * -(-tokens.shape[1] // block_size)


def run_in_steps(
    tokens: Tensor,
    forward: Forward,
    block_size: int = SCRATCH_BLOCK_SIZE,
    starts: Tensor | None = None,
    *,
    is_cut: bool = True,
) -> Tensor:
    """Float32 logits [Q, L, V] of `tokens` [Q, L], computed in two steps, sequences side by side.

    In one step unless `is_cut`. Block tables are a shuffle of all blocks below
    `num_scratch_blocks(tokens, block_size)`. `starts`: [Q], the position of each sequence's first
    token; nothing stands before it.
    """
    num_sequences, length = tokens.shape
    num_blocks = num_scratch_blocks(tokens, block_size)
    block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
    block_tables = block_ids.view(num_sequences, -1)
    computed = torch.zeros(num_sequences, dtype=torch.int64)
    offsets = [0] * num_sequences if starts is None else starts.tolist()
    logits: list[list[Tensor]] = [[] for _ in range(num_sequences)]
    whole = torch.full((num_sequences,), length)
    for new in _chunks(num_sequences, length) if is_cut else [whole]:
        batch = build_paged_batch(block_tables, computed, new, block_size, tokens.device)
        spans = list(zip(computed.tolist(), (computed + new).tolist(), strict=True))
        places = [offset + torch.arange(*span) for offset, span in zip(offsets, spans, strict=True)]
        positions = torch.cat(places).to(tokens.device)
        input_ids = torch.cat([tokens[q, start:end] for q, (start, end) in enumerate(spans)])
        parts = torch.split(forward(input_ids, positions, batch), new.tolist())
        for of_sequence, part in zip(logits, parts, strict=True):
            of_sequence.append(part.to(torch.float32, copy=True))
        computed = computed + new
    return torch.stack([torch.cat(parts) for parts in logits])


def probe_attention(
    model: Any,  # noqa: ANN401
    tokens: Tensor,
    rounding_noise: float = 0.0,
    starts: Tensor | None = None,
    *,
    is_cut: bool = True,
) -> tuple[Tensor, ProbeContext]:
    """Logits [Q, L, V] of `tokens` [Q, L], as `run_in_steps` computes them with our attention.

    `model` must be switched to our attention and is unbound again afterwards. Also returns what its
    modules did. Raises ModelUnsupported for what paged attention cannot do.
    """
    context = ProbeContext(num_scratch_blocks(tokens), rounding_noise)

    def forward(input_ids: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        context.begin_forward(batch)
        output = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    modules = list(model.modules())
    bind(modules, context)
    try:
        return run_in_steps(tokens, forward, starts=starts, is_cut=is_cut), context
    finally:
        unbind(modules)


def _chunks(num_sequences: int, length: int) -> Iterator[Tensor]:
    """Numbers of new tokens [Q] of each step; they add up to `length` each.

    Two steps are enough to see whether something got lost between them, and each costs a pass over
    the weights. The first sequence brings half of its tokens, the others one.
    """
    first = torch.ones(num_sequences, dtype=torch.int64)
    first[0] = max(1, length // 2)
    yield first
    if length > 1:
        yield length - first
