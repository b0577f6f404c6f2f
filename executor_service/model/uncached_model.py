"""Models of `transformers` that return vectors of whole texts, without KV pools.

The tokens of all rows of a step go through the model side by side, without padding, and each row
attends to its own tokens alone. A model whose own code does not allow that computes rows of equal
length together.

Shape letters: R rows, L tokens of a row, T tokens of all rows, W width of the model, n rows of
equal length, H query heads, G key/value heads, D size of a query or key head, E size of a value
head.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor_service.device import is_beyond_rows
from executor_service.errors import ModelUnsupported
from executor_service.model.loaded_model import numbers_from_padding
from executor_service.model.pooling import PoolingMode, VectorHead, pool
from executor_service.model.transformers_attention import (
    IMPLEMENTATION_NAME,
    bind,
    register_attention,
)
from executor_service.steps import PoolingParams
from splitserve_kernels.paged_batch import AttentionOptions

_log = logging.getLogger(__name__)

# Tokens of a pass on a CPU, of several rows. Measured with 4000 tokens on two cores: 0.66 s, in one
# pass 0.77 s.
_MAX_PASS_TOKENS = 1024
# On other devices rows attend together, padded, if the longest is at most this many times as long
# as the shortest, or short itself: they spend more time on launches than on padding. Lengths are
# multiples of what their kernels compute at a time.
_LONGEST_TO_SHORTEST = 1.5
_SHORT_LENGTH = 64
_LENGTH_STEP = 16
# Queries of a layer with a sliding window that are computed together.
_STRETCH = 128
_TOKEN_TYPES = "token_type_ids"
_POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True)
class TextRow:
    """Tokens of a row, [L] int64 on the CPU. `second_start`: 0 for one text."""

    token_ids: Tensor
    second_start: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Adjoining rows that attend together, `length` tokens each, padding included.

    `places`: for each of these tokens the one of the group that stands there, [n * length]; any in
    the place of padding. `kept`: where the group's tokens are, [num_tokens]. `is_token`: not
    padding, [n, length]. All three are None without padding.
    """

    num_tokens: int
    length: int
    places: Tensor | None = None
    kept: Tensor | None = None
    is_token: Tensor | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> _Group:
        """Returns the group of rows of `lengths`, in ascending order."""
        if lengths[0] == lengths[-1]:
            return cls(sum(lengths), lengths[0])
        length = -(-lengths[-1] // _LENGTH_STEP) * _LENGTH_STEP
        sizes = torch.tensor(lengths)
        is_token = torch.arange(length) < sizes[:, None]
        kept = is_token.flatten().nonzero()[:, 0]
        places = torch.zeros(is_token.numel(), dtype=torch.int64)
        places[kept] = torch.arange(len(kept))
        return cls(len(kept), length, *(each.to(device) for each in (places, kept, is_token)))

    def of_rows(self, heads: Tensor) -> Tensor:
        """Returns [n, H, length, D] for `heads` [num_tokens, H, D]."""
        padded = heads if self.places is None else heads[self.places]
        return padded.view(-1, self.length, *heads.shape[1:]).transpose(1, 2)

    def of_tokens(self, heads: Tensor) -> Tensor:
        """Returns [num_tokens, H, D] for `heads` [n, H, length, D]."""
        padded = heads.transpose(1, 2).flatten(0, 1)
        return padded if self.kept is None else padded[self.kept]


class RowsContext:
    """Attends from each row to its own tokens. A context of `transformers_attention`."""

    sees_later = True

    def __init__(self, *, is_causal: bool, pads: bool = False) -> None:
        """`is_causal`: tokens attend to themselves and to earlier ones.

        `pads`: rows of similar lengths attend together, as long as the longest.
        """
        self.is_causal = is_causal
        self._pads = pads
        self._groups: tuple[_Group, ...] = ()
        self._masks: dict[tuple[int, int, int, int], Tensor] = {}
        # Sliding window of each module that attended in the last pass, in their order.
        self.attended: dict[nn.Module, int | None] = {}

    def begin_forward(self, lengths: Sequence[int], device: torch.device) -> None:
        """Sets the numbers of tokens of the rows of the next pass, in ascending order."""
        groups: list[list[int]] = []
        for length in lengths:
            if not groups or length > self._longest_beside(groups[-1][0]):
                groups.append([])
            groups[-1].append(length)
        self._groups = tuple(_Group.of(group, device) for group in groups)
        self._masks.clear()
        self.attended.clear()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [T, H, E] for `query` [T, H, D], `key` [T, G, D] and `value` [T, G, E]."""
        if options.sinks is not None or options.softcap is not None:
            raise ModelUnsupported(f"{type(module).__name__} has a soft cap or sinks")
        if options.relative_bias is not None:
            raise ModelUnsupported(f"{type(module).__name__} has relative biases")
        self.attended[module] = options.sliding_window
        outputs, start = [], 0
        for group in self._groups:
            end = start + group.num_tokens
            attended = self._attended(
                group.of_rows(query[start:end]),
                group.of_rows(key[start:end]),
                group.of_rows(value[start:end]),
                group.is_token,
                options,
            )
            outputs.append(group.of_tokens(attended))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def attend_to_encoder(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        raise AssertionError("models that return vectors have no cross attention")

    def _longest_beside(self, length: int) -> float:
        """Returns the tokens of the longest row that attends together with one of `length`."""
        return max(_SHORT_LENGTH, _LONGEST_TO_SHORTEST * length) if self._pads else length

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_token: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Returns [n, H, L, E] for [n, H, L, D], [n, G, L, D] and [n, G, L, E].

        `is_token`: [n, L], which positions are no padding; None if all are. Padding's outputs have
        no meaning.
        """
        length, window = query.shape[2], options.sliding_window
        attend = partial(
            functional.scaled_dot_product_attention,
            scale=options.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        if window is None or window >= length:
            if is_token is None or self.is_causal:  # padding is later than all tokens
                return attend(query, key, value, is_causal=self.is_causal)
            return attend(query, key, value, attn_mask=is_token[:, None, None])
        # Stretches of queries, with the keys that any of them sees.
        parts = []
        for first in range(0, length, _STRETCH):
            last = min(first + _STRETCH, length)
            begin = max(0, first - window + 1)
            end = last if self.is_causal else min(length, last + window - 1)
            mask = self._mask(first - begin, last - first, end - begin, window, query.device)
            keys = slice(begin, end)
            if is_token is not None:
                mask = mask & is_token[:, None, None, keys]
            parts.append(
                attend(query[:, :, first:last], key[:, :, keys], value[:, :, keys], attn_mask=mask)
            )
        return torch.cat(parts, dim=2)

    def _mask(
        self, offset: int, num_queries: int, num_keys: int, window: int, device: torch.device
    ) -> Tensor:
        """Returns which queries see which keys, [queries, keys]; query 0 is at key `offset`."""
        shape = (offset, num_queries, num_keys, window)
        mask = self._masks.get(shape)
        if mask is None:
            queries = torch.arange(offset, offset + num_queries, device=device)
            distance = queries[:, None] - torch.arange(num_keys, device=device)
            mask = distance.abs() < window
            if self.is_causal:
                mask &= distance >= 0
            self._masks[shape] = mask
        return mask


class TextModel:
    """Hidden states, or a classifier's logits, of rows by a model of `transformers`.

    The rows of a call are ordered by length, so that equal ones adjoin.
    """

    def __init__(
        self,
        whole: Any,  # noqa: ANN401
        modes: Sequence[PoolingMode],
        *,
        is_causal: bool,
        max_model_len: int,
    ) -> None:
        """Takes over `whole`. `modes`: pooling; empty for a classifier, whose logits are computed.

        `is_causal`: tokens attend to no later ones. `max_model_len`: longest row.
        """
        self.whole = whole
        self.max_model_len = max_model_len
        self.is_flat = False
        self._modes = tuple(modes)
        self._base: Any = whole if modes else whole.base_model
        self._takes = inspect.signature(self._base.forward).parameters
        self._num_types = int(getattr(whole.config, "type_vocab_size", 0) or 0)
        self._padding = _padding_index(self._base)
        self._computed: _Computed | None = None
        self._context = RowsContext(is_causal=is_causal, pads=self.device.type != "cpu")

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        found: torch.device = self.whole.device
        return found

    @property
    def can_be_flat(self) -> bool:
        """Whether the model can be told the positions of tokens."""
        return _POSITIONS in self._takes

    @property
    def attended(self) -> tuple[list[nn.Module], list[int]]:
        """Modules that attended in the last pass of rows side by side, and the sliding windows."""
        attended = self._context.attended
        return list(attended), [each for each in attended.values() if each is not None]

    def like(self, whole: Any) -> TextModel:  # noqa: ANN401
        """Returns a TextModel of `whole` with the pooling, causality and limit of this one."""
        return TextModel(
            whole,
            self._modes,
            is_causal=self._context.is_causal,
            max_model_len=self.max_model_len,
        )

    def switch(self, *, is_flat: bool) -> None:
        """Chooses between rows side by side, and rows of equal length by the model's own code."""
        register_attention()
        self.is_flat = is_flat
        if is_flat:
            self.whole.set_attn_implementation(IMPLEMENTATION_NAME)
            bind(self._base.modules(), self._context)
            if not self._modes and self._computed is None:
                self._computed = _Computed(self._base)
                setattr(self.whole, self.whole.base_model_prefix, self._computed)
            return
        if self._computed is not None:
            setattr(self.whole, self.whole.base_model_prefix, self._base)
            self._computed = None
        self.whole.set_attn_implementation(_own_attention(self.whole))

    @torch.inference_mode()
    def outputs(self, rows: Sequence[TextRow]) -> Tensor:
        """Returns pooled states, or logits, of each row: float32 [R, ..]."""
        groups = [list(same) for _, same in itertools.groupby(rows, lambda r: len(r.token_ids))]
        if not self.is_flat:
            return torch.cat([self._own_outputs(group) for group in groups])
        states = self.states(rows)
        lengths = [(len(group), len(group[0].token_ids)) for group in groups]
        parts = torch.split(states, [num * length for num, length in lengths])
        return torch.cat(
            [
                self._pooled(part.view(*sizes, -1))
                for part, sizes in zip(parts, lengths, strict=True)
            ]
        )

    @torch.inference_mode()
    def states(self, rows: Sequence[TextRow]) -> Tensor:
        """Returns the hidden states [T, W] of rows side by side. The model must be flat."""
        token_ids = torch.cat([row.token_ids for row in rows])
        positions = torch.cat([self._positions(row.token_ids) for row in rows])
        self._context.begin_forward([len(row.token_ids) for row in rows], self.device)
        named = {_POSITIONS: positions[None].to(self.device)}
        if self._takes_types:
            named[_TOKEN_TYPES] = torch.cat([_types(row) for row in rows])[None].to(self.device)
        output = self._base(input_ids=token_ids[None].to(self.device), **named)
        states: Tensor = output.last_hidden_state[0]
        return states

    @torch.inference_mode()
    def own_states(self, row: TextRow) -> Tensor:
        """Returns the hidden states [L, W] of a row by the model's own code.

        The model must not be flat.
        """
        output = self._base(**self._own_inputs([row]))
        states: Tensor = output.last_hidden_state[0]
        return states

    def _pooled(self, states: Tensor) -> Tensor:
        """Returns the pooled states, or logits, of `states` [n, L, W]."""
        if self._computed is None:
            return pool(states, self._modes)
        self._computed.states = states
        ones = torch.ones(states.shape[:2], dtype=torch.int64, device=states.device)
        # Some classifiers look for the last token that is no padding.
        ordinary = 2 if self.whole.config.pad_token_id == 1 else 1
        logits: Tensor = self.whole(input_ids=ordinary * ones, attention_mask=ones).logits
        return logits.float()

    def _own_outputs(self, rows: Sequence[TextRow]) -> Tensor:
        inputs = self._own_inputs(rows)
        output = self.whole(**inputs)
        if self._modes:
            return pool(output.last_hidden_state, self._modes)
        logits: Tensor = output.logits
        return logits.float()

    def _own_inputs(self, rows: Sequence[TextRow]) -> dict[str, Tensor]:
        """Returns the inputs [n, L] of rows of equal length."""
        token_ids = torch.stack([row.token_ids for row in rows]).to(self.device)
        named = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        if self._takes_types:
            named[_TOKEN_TYPES] = torch.stack([_types(row) for row in rows]).to(self.device)
        return named

    @property
    def _takes_types(self) -> bool:
        # A model with one type has it for all tokens.
        return _TOKEN_TYPES in self._takes and self._num_types > 1

    def _positions(self, token_ids: Tensor) -> Tensor:
        if self._padding is None:
            return torch.arange(len(token_ids))
        is_token = (token_ids != self._padding).long()
        return is_token.cumsum(0) * is_token + self._padding


class _Computed(nn.Module):
    """Takes the place of a classifier's base model. `states`: [n, L, W], its hidden states."""

    states: Tensor

    def __init__(self, base: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.base = base
        self._pooler = getattr(base, "pooler", None)
        # Of ALBERT, whose pooler is given one token.
        self._pooler_activation = getattr(base, "pooler_activation", None)

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of tokens."""
        found: nn.Module = self.base.get_input_embeddings()
        return found

    def forward(self, *_arguments: object, **_named: object) -> Any:  # noqa: ANN401
        """Returns the hidden states in the form of the base model's output."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled = None
        pooler: Any = self._pooler
        if self._pooler_activation is not None:
            pooled = self._pooler_activation(pooler(self.states[:, 0]))
        elif pooler is not None:
            pooled = pooler(self.states)
        output: Any = BaseModelOutputWithPooling(
            last_hidden_state=self.states, pooler_output=pooled
        )
        # Decoders return their caches, too.
        output.cache = output.past_key_values = None
        return output


def _types(row: TextRow) -> Tensor:
    """Returns the token types of a row, [L]."""
    types = torch.zeros_like(row.token_ids)
    if row.second_start:
        types[row.second_start :] = 1
    return types


def _padding_index(base: Any) -> int | None:  # noqa: ANN401
    """Returns the index after which positions start; None for those that start at 0."""
    if not numbers_from_padding(type(base)):
        return None
    embeddings = getattr(base, "embeddings", None)
    index = getattr(embeddings, "padding_idx", None)
    return int(base.config.pad_token_id if index is None else index)


def num_positions_before(base: Any) -> int:  # noqa: ANN401
    """Returns how many embedded positions a model leaves unused before that of the first token."""
    index = _padding_index(base)
    return 0 if index is None else index + 1


def _own_attention(whole: Any) -> str:  # noqa: ANN401
    return "sdpa" if getattr(type(whole), "_supports_sdpa", False) else "eager"


class RowVectors:
    """An UncachedModel: a TextModel with its last steps. A row that raises fails alone."""

    def __init__(self, text_model: TextModel, head: VectorHead) -> None:
        self._model = text_model
        self._head = head

    @torch.inference_mode()
    def vectors(self, rows: Sequence[tuple[Tensor, PoolingParams]]) -> list[Tensor | str]:
        order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]))
        results: list[Tensor | str] = [""] * len(rows)
        for row, found in zip(order, self._passes([rows[row] for row in order]), strict=True):
            results[row] = found
        return results

    def _passes(self, rows: Sequence[tuple[Tensor, PoolingParams]]) -> list[Tensor | str]:
        """Computes `rows` in passes whose states fit into a CPU's caches; on others in one."""
        if self._model.device.type != "cpu":
            return self._apart(rows)
        found: list[Tensor | str] = []
        start = num_tokens = 0
        for row, (token_ids, _) in enumerate(rows):
            if start < row and num_tokens + len(token_ids) > _MAX_PASS_TOKENS:
                found += self._apart(rows[start:row])
                start, num_tokens = row, 0
            num_tokens += len(token_ids)
        return found + self._apart(rows[start:])

    def _apart(self, rows: Sequence[tuple[Tensor, PoolingParams]]) -> list[Tensor | str]:
        """Computes `rows` in one pass; row by row if that raises."""
        try:
            return [*self._together(rows)]
        except Exception as error:
            if is_beyond_rows(error):
                raise
            _log.exception("vectors_failed num_rows=%d", len(rows))
            if len(rows) == 1:
                # The exception's type only: its text might quote the input.
                return [f"{type(error).__name__} in the forward pass"]
        return [found for row in rows for found in self._apart([row])]

    def _together(self, rows: Sequence[tuple[Tensor, PoolingParams]]) -> list[Tensor]:
        texts = [TextRow(token_ids, params.second_text_start) for token_ids, params in rows]
        outputs = self._model.outputs(texts)
        vectors = self._head.finish(outputs, [params for _, params in rows])
        if outputs.device.type == "cpu":
            return vectors
        sizes = [len(vector) for vector in vectors]
        return list(torch.split(torch.cat(vectors).cpu(), sizes))
