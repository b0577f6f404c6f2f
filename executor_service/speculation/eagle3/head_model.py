"""EAGLE-3 head as a PagedModel, and the states that it reads, kept in KV blocks.

For the token at position p the head reads the token and the target model's states at p - 1, and
guesses the token at p + 1. So it computes nothing for the first token. Where the target has
computed the position before, the states are the target's (`HeadStates`); after the last of these
the head goes on with its own. As in all published heads, key and value of the token at p have
position p - 1, and its slot.

The head guesses from the last token of a row only; for all other tokens it computes only keys and
values.

Shape letters: T input tokens, S of them with logits, W width of the head, H query heads, G
key/value heads, D head size, U tokens that the head can guess, V tokens of the target model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from executor_service.backends import LayerCompute
from executor_service.device import KVCache, LayerShape
from executor_service.model import InputBatch, PassRows, PassTensors, send_rows
from executor_service.speculation.eagle3.head_weights import HeadConfig, HeadWeights
from splitserve_kernels.paged_batch import AttentionOptions, lay_out_decodes, lay_out_rows

Embed = Callable[[Tensor], Tensor]


class HeadModel:
    """PagedModel of a head. Its keys and values are in the first layer of a cache."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        compute: LayerCompute,
        embed: Embed,
        cache: KVCache,
        states: HeadStates,
        window: int | None = None,
    ) -> None:
        """Prepares the head. `embed`: token ids [T] -> [T, W].

        `window`: most tokens that a token attends to; None for no limit.
        """
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        make_rotary: Any = LlamaRotaryEmbedding
        self._config = config
        self._weights = weights
        self._attention = compute.attention
        self._embed = embed
        self._cache = cache
        self._states = states
        self._rotary = make_rotary(config.llama)
        self._options = AttentionOptions(config.head_dim**-0.5, sliding_window=window)
        self._key_value = compute.linear(torch.cat([weights.key, weights.value]))
        self._query = compute.linear(weights.query)
        self._attention_output = compute.linear(weights.attention_output)
        self._gate_up = compute.linear(torch.cat([weights.gate, weights.up]))
        self._down = compute.linear(weights.down)
        self._head = compute.linear(weights.head)

    def logits(self, batch: InputBatch) -> Tensor:
        """Returns the logits, and stores the head's own states in the slots of the asked tokens."""
        rows, index = batch.rows, batch.rows.logits_index
        before = send_rows(self._position_before(rows), batch.uploads)
        states = self._states.of(before.paged.slot_mapping)
        inputs = self._inputs(before.input_ids[0], states)
        self._store(before, inputs)
        if not len(index):
            return inputs.new_empty(0, self._config.vocab_size, dtype=torch.float32)
        asked = torch.from_numpy(index)
        place = send_rows(self._asked(rows), batch.uploads)
        output = self._output(place, inputs[asked], states[asked])
        self._states.put(torch.from_numpy(rows.layout.slots[index]), output)
        return self._read_out(output)

    def _position_before(self, rows: PassRows) -> PassRows:
        """Returns `rows` with each token at the position of the one before."""
        computed = rows.num_computed_tokens - 1
        num_new = np.diff(rows.layout.query_starts)
        layout = lay_out_rows(rows.block_tables, computed, num_new, self._cache.block_size)
        return PassRows(rows.token_ids, computed, rows.block_tables, layout, rows.logits_index)

    def _asked(self, rows: PassRows) -> PassRows:
        """Returns the asked tokens as rows of one token each, at the position of the one before."""
        index = rows.logits_index
        positions = rows.layout.positions[index] - 1
        tables = rows.block_tables[rows.layout.row_of_token[index]]
        layout = lay_out_decodes(tables, positions, self._cache.block_size)
        return PassRows(rows.token_ids[index], positions, tables, layout, index)

    def _inputs(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Returns the inputs of the layer, [T, 2 W]."""
        weights = self._weights
        embedded = self._norm(self._embed(token_ids).to(states.dtype), weights.input_norm)
        return torch.cat([embedded, self._norm(states, weights.hidden_norm)], dim=-1)

    def _store(self, place: PassTensors, inputs: Tensor) -> None:
        """Writes keys and values [T, G, D] of `inputs` [T, 2 W]."""
        key, value = self._heads(self._key_value(inputs)).chunk(2, dim=1)
        key = self._rotated(key, place.position_ids)
        key_pool, value_pool = self._cache.key_pools[0], self._cache.value_pools[0]
        self._attention.write_kv(
            key.contiguous(), value.contiguous(), key_pool, value_pool, place.paged
        )

    def _output(self, place: PassTensors, inputs: Tensor, states: Tensor) -> Tensor:
        """Returns the output [S, W] of the layer, which attends to stored keys and values.

        `inputs`: [S, 2 W]. `states`: [S, W].
        """
        query = self._rotated(self._heads(self._query(inputs)), place.position_ids)
        key_pool, value_pool = self._cache.key_pools[0], self._cache.value_pools[0]
        attended = self._attention.paged_attention(
            query.contiguous(), key_pool, value_pool, place.paged, self._options
        )
        output = states + self._attention_output(attended.flatten(1))
        gate, up = self._gate_up(self._norm(output, self._weights.mlp_norm)).chunk(2, dim=-1)
        return output + self._down(F.silu(gate) * up)

    def _read_out(self, output: Tensor) -> Tensor:
        """Returns logits [S, V] of `output` [S, W]; -inf for tokens that the head cannot guess."""
        known = self._head(self._norm(output, self._weights.final_norm)).float()
        logits = known.new_full((len(output), self._config.vocab_size), -torch.inf)
        logits[:, self._weights.token_ids] = known
        return logits

    def _heads(self, joined: Tensor) -> Tensor:
        return joined.view(len(joined), -1, self._config.head_dim)

    def _rotated(self, heads: Tensor, position_ids: Tensor) -> Tensor:
        """Applies the rotary embedding to `heads` [T, .., D] at `position_ids` [1, T]."""
        cosines, sines = self._rotary(heads, position_ids)
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        rotated: Tensor = heads * cosines[0, :, None] + turned * sines[0, :, None]
        return rotated

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(states, weight.shape, weight, self._config.epsilon)


# -- States of tokens, kept in the blocks of their keys and values ---------------------------------
#
# So block moves, copies and prefix hits include them, and no other bookkeeping is needed.
#
# Shape letters: N blocks, B block size, W width of the head, M of the target model, T tokens.


def states_shape(width: int) -> LayerShape:
    """Returns the space of states in a block: that of keys of size `width`, without values."""
    return LayerShape(num_kv_heads=1, key_dim=width, value_dim=0)


class HeadStates:
    """States of tokens, by the slots of these tokens."""

    def __init__(self, pool: Tensor, join: Callable[[Tensor], Tensor]) -> None:
        """Wraps `pool` [N, B, 1, W].

        `join`: makes states [T, W] of the target's states [T, 3 M].
        """
        self._pool = pool
        self._join = join

    def take(self, states: Tensor, slots: Tensor) -> None:
        """Stores the target's states, [3, T, M] in any dtype, of the tokens at `slots` [T]."""
        joined = states.transpose(0, 1).flatten(1).to(self._pool.dtype)
        self.put(slots, self._join(joined))

    def put(self, slots: Tensor, states: Tensor) -> None:
        """Stores `states` [T, W] at `slots` [T] int64."""
        self._pool[slots // self._block_size, slots % self._block_size, 0] = states

    def of(self, slots: Tensor) -> Tensor:
        """Returns the states, [T, W], at `slots` [T] int64."""
        return self._pool[slots // self._block_size, slots % self._block_size, 0]

    @property
    def _block_size(self) -> int:
        return self._pool.shape[1]
