"""Sampling of token ids from logits, for all rows of a step at once.

The arithmetic is that of `SamplingParams` in `executor.proto`. Greedy choice, temperature and the
random number u (Philox) are in this file; bias and penalties in `logit_adjustments.py`; top-k,
top-p and min-p in `truncation.py`. This file also holds the interface of draws that can be
recorded, and the columns for a kernel that adjusts logits.

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from executor_service.device import Uploads, streams_of, to_device
from executor_service.sampling.logit_adjustments import adjust_logits
from executor_service.sampling.token_counts import CountedRows, TokenCounts
from executor_service.sampling.transcription import apply_transcription_rules
from executor_service.sampling.truncation import truncate, truncate_unseen
from executor_service.steps import (
    BoolArray,
    Float32Array,
    Int32Array,
    Int64Array,
    ParamRows,
    SamplingParams,
    TokenMasks,
)
from splitserve_kernels.draw_rows import FURTHER_LIMITS, DrawRows

# Block size for summing the vocabulary, before a token is searched inside one block.
_BLOCK = 512
# Rows whose logits are adjusted at a time on a CPU. Their copy is small enough to reuse memory; the
# copy of a whole step would be mapped and unmapped each time.
_ROWS_AT_A_TIME = 32
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Rows that sample.

    `params`, `histories`: S long; of a history, the first `positions[i]` tokens count. `seeds`: [S]
    int64. `positions`: [S] int32, the index in its sequence of the token to sample.
    `num_prompt_tokens`: [S] int32. `masks`: of rows with a grammar, by their indexes here; None if
    there are none. `counted`: token counts of rows with penalties; None if there are none, or if
    they are yet to be counted from the histories.
    """

    params: ParamRows
    seeds: Int64Array
    positions: Int32Array
    num_prompt_tokens: Int32Array
    histories: Sequence[Sequence[int] | None]
    masks: TokenMasks | None = None
    counted: CountedRows | None = None

    @property
    def penalized(self) -> Int64Array:
        """Rows with penalties, as rising indexes."""
        adjusts = self.params.adjusts_logits
        if not np.count_nonzero(adjusts):
            return _NO_ROWS
        rows = np.flatnonzero(adjusts).tolist()
        return np.array([row for row in rows if self.params[row].uses_penalties], np.int64)

    def with_counts(self, counts: TokenCounts, row_ids: Int32Array) -> SamplingRows:
        """Returns the rows with the token counts of those that have penalties, from `counts`.

        `row_ids`: [S].
        """
        rows = self.penalized
        if not len(rows):
            return self
        counted = counts.of_rows(
            rows,
            row_ids[rows],
            [self.histories[row] for row in rows.tolist()],
            self.positions[rows],
            self.num_prompt_tokens[rows],
        )
        return replace(self, counted=counted)

    def part(self, rows: slice) -> SamplingRows:
        """Returns the slice `rows`."""
        return SamplingRows(
            self.params.take(np.arange(len(self.params))[rows]),
            self.seeds[rows],
            self.positions[rows],
            self.num_prompt_tokens[rows],
            self.histories[rows],
            None if self.masks is None else self.masks.part(rows),
            None if self.counted is None else self.counted.part(rows),
        )


def draw_rows(rows: SamplingRows, vocab_size: int) -> DrawRows:
    """Converts `rows` to the columns that the drawing kernel takes."""
    params = rows.params
    return DrawRows(
        temperatures=params.temperatures,
        top_k=params.top_k(vocab_size),
        seeds=rows.seeds.astype(np.int64),
        positions=rows.positions.astype(np.int64),
        **{name: params.column(name) for name in FURTHER_LIMITS},
    )


# Returns token ids [S] int32, -1 for invalid rows, on the device of the logits. Arguments: adjusted
# logits [S, V] float32 and their rows.
Draw = Callable[[Tensor, SamplingRows], Tensor]
# Returns adjusted logits, as a copy where they differ. Arguments: logits [S, V] float32, their
# rows, and the uploads for large arrays.
Adjust = Callable[[Tensor, SamplingRows, Uploads], Tensor]
# Returns weights, 0 for tokens that are cut. Arguments: scaled logits and their parameters.
Truncate = Callable[[Tensor, ParamRows], Tensor]


def sample(
    logits: Tensor,
    rows: SamplingRows,
    draw: Draw | None = None,
    adjust: Adjust | None = None,
    uploads: Uploads | None = None,
) -> Tensor:
    """Chooses one token for each row. `logits`: [S, V] float32, not changed.

    `adjust` applies masks, biases and penalties, then `draw` chooses; None for plain torch.
    `uploads`: to the device of `logits`; None to create some. Returns [S] int32 on that device: -1
    where no token can be chosen, because a row of logits has NaN or +inf, or -inf alone.
    """
    draw, adjust, num_rows = draw or draw_in_torch, adjust or adjust_in_torch, len(logits)
    if not rows.params.adjusts_logits.any():
        return draw(logits, rows)
    uploads = uploads or Uploads(logits.device, streams_of(logits.device))
    if rows.counted is None:
        counts = TokenCounts(logits.shape[1], logits.device, uploads)
        rows = rows.with_counts(counts, np.arange(num_rows, dtype=np.int32))
    size = _ROWS_AT_A_TIME if logits.device.type == "cpu" else num_rows
    token_ids = []
    for start in range(0, num_rows, size):
        part = slice(start, start + size)
        of_part, rows_of_part = logits[part], rows if size >= num_rows else rows.part(part)
        adjusted = apply_transcription_rules(
            adjust(of_part, rows_of_part, uploads),
            rows_of_part.params,
            rows_of_part.positions,
            rows_of_part.num_prompt_tokens,
            rows_of_part.histories,
        )
        drawn = draw(adjusted, rows_of_part)
        # Checked on the logits before adjustment: suppression may have hidden an infinity.
        token_ids.append(torch.where(torch.isfinite(of_part.amax(dim=-1)), drawn, -1))
    return torch.cat(token_ids)


def adjust_in_torch(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    """Applies steps 1 and 2 of `SamplingParams` in `executor.proto`."""
    return adjust_logits(
        logits,
        rows.params,
        rows.positions,
        rows.num_prompt_tokens,
        rows.histories,
        rows.masks,
        rows.counted,
        uploads,
    )


def draw_in_torch(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Chooses the largest logit of each row, or draws where the row has a temperature.

    The host reads intermediate results, so this is for logits on a CPU.
    """
    return _draw_with(truncate, adjusted, rows)


def draw_unseen_in_torch(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Does the same as `draw_in_torch`, but without the host reading or waiting for a device."""
    return _draw_with(truncate_unseen, adjusted, rows)


def _draw_with(truncate: Truncate, adjusted: Tensor, rows: SamplingRows) -> Tensor:
    # torch.max returns the first of equal maxima. Its value is NaN, +inf or -inf exactly for the
    # rows that are invalid.
    largest, token_ids = adjusted.max(dim=-1)
    random_rows = np.flatnonzero(rows.params.temperatures > 0)
    if random_rows.size:
        device, params = adjusted.device, rows.params.take(random_rows)
        selected = to_device(random_rows, device)
        weights = truncate(_scale(adjusted, largest, selected, params.temperatures), params)
        u = uniform(
            to_device(rows.seeds[random_rows].astype(np.int64), device),
            to_device(rows.positions[random_rows].astype(np.int64), device),
        )
        # Invalid rows get an arbitrary id below V.
        token_ids[selected] = _draw(weights, u)
    return torch.where(torch.isfinite(largest), token_ids, -1).to(torch.int32)


def _scale(adjusted: Tensor, largest: Tensor, selected: Tensor, temperatures: np.ndarray) -> Tensor:
    """Returns logits of the selected rows over temperature, the largest of each row at 0."""
    # Softmax is invariant to a shift, and shifting first cannot overflow at a tiny temperature.
    shifted = adjusted[selected] - largest[selected, None]
    return shifted / to_device(temperatures, adjusted.device)[:, None]


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Returns the first token id whose running sum of weights exceeds u times their total.

    `weights`: [S, V] float32, >= 0. `u`: [S] float64. Sums are float64. Returns [S] int64. Rows
    with NaN get an arbitrary id below V.
    """
    num_rows, vocab_size = weights.shape
    padding = -vocab_size % _BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(num_rows, -1, _BLOCK)  # [S, L, ..]
    block_sums = blocks.sum(dim=-1, dtype=torch.float64)
    running = block_sums.cumsum(dim=-1)
    target = u * running[:, -1]
    block = _first_above(running, target, block_sums)
    row = torch.arange(num_rows, device=weights.device)
    before = torch.where(block > 0, running[row, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[row, block].to(torch.float64)
    offset = _first_above(inside.cumsum(dim=-1), target - before, inside)
    return (block * _BLOCK + offset).clamp(max=vocab_size - 1)


def _first_above(running: Tensor, target: Tensor, parts: Tensor) -> Tensor:
    """Returns the index of the first running sum > target; [S, n], [S], [S, n] -> [S] int64.

    If no sum exceeds the target because of rounding, returns the last part that is not empty.
    """
    first = (running <= target[:, None]).sum(dim=-1)
    last = parts.shape[-1] - 1 - (parts > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(first, last)


# -- Draws with parameters on the device -----------------------------------------------------------
#
# The launched kernels do not depend on the parameters, so a recording of a step can draw as well.
# Shape letters: S rows that are drawn, N rows of a recording, V tokens of the vocabulary.


class StaticDraw(Protocol):
    """Chooses the same tokens as the Draw that it belongs to."""

    def num_words(self, num_rows: int) -> int:
        """Returns the number of int64 words that describe the draws of `num_rows` rows."""
        ...

    def pack(self, rows: DrawRows, words: Int64Array) -> None:
        """Writes `rows` [S] into `words`, which have room for N rows; rows beyond S are greedy.

        All rows are greedy where all words are 0.
        """
        ...

    def advance(self, words: Tensor, num_positions: Tensor) -> None:
        """Changes `words` on the device so that each row is drawn at a later position.

        `num_positions`: [N] int64 on the device, how far each row's position is advanced.
        """
        ...

    def draw(self, logits: Tensor, words: Tensor) -> Tensor:
        """Draws from `logits` [N, V] float32 by `words`, int64 on the same device.

        Returns [N] int32, -1 where no token can be chosen.
        """
        ...


# -- Philox4x32-10, a counter-based random source --------------------------------------------------
#
# The bits are a function of (seed, position) alone. Source: Salmon, Moraes, Dror, Shaw, "Parallel
# random numbers: as easy as 1, 2, 3", SC 2011.
#
# A 32-bit word is an int64 in 0 .. 2^32 - 1, which CPU and CUDA treat alike. Shape letter: S
# samples.

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words2 = tuple[Tensor, Tensor]
Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32_10(counter: Words4, key: Words2) -> Words4:
    """Returns four random words for each counter. All tensors: [S] int64 of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_INCREMENTS[0]) & _WORD
        k1 = (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns numbers in [0, 1) with 53 random bits, the u of `SamplingParams` in `executor.proto`.

    `seeds`: [S] int64, its bits taken as unsigned. `positions`: [S] int64, >= 0. Returns [S]
    float64.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, (positions >> 32) & _WORD, zero, zero)
    a, b, _, _ = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    return ((a << 21) + (b >> 11)).to(torch.float64) * 2.0**-53


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low word of the 64-bit product."""
    # The product may wrap to a negative int64; its bits are right, and the masks drop the sign.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


# -- Logit adjustments of rows as columns for a kernel, numpy only ---------------------------------
#
# Shape letters: S rows that sample, V tokens of the vocabulary, G masks, W words of a mask, E
# biases over all rows.

_NONE = -1
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class LogitColumns:
    """Adjustments of all rows; see `AdjustColumns` of the kernel.

    `bias_starts`: [S + 1]. `penalties`: [S, 3].
    """

    mask_lines: Int32Array
    mask_words: Int32Array
    bias_starts: Int32Array
    biased_tokens: Int32Array
    biases: Float32Array
    count_lines: Int32Array
    penalties: Float32Array

    @classmethod
    def of(cls, rows: SamplingRows, vocab_size: int) -> LogitColumns | None:
        """Builds the columns; None if no row needs an adjustment now."""
        mask_lines, mask_words = _masks(rows, vocab_size)
        bias_starts, biased_tokens, biases = _biases(rows)
        count_lines, penalties = _penalties(rows)
        if not (len(mask_words) or len(biases) or np.count_nonzero(count_lines >= 0)):
            return None
        return cls(
            mask_lines, mask_words, bias_starts, biased_tokens, biases, count_lines, penalties
        )


def _masks(rows: SamplingRows, vocab_size: int) -> tuple[Int32Array, Int32Array]:
    """Returns the mask line of each row [S], -1 for none, and the masks [G, W] of allowed tokens.

    Masks combine grammars and the tokens that rows may never sample.
    """
    lines = np.full(len(rows.params), _NONE, np.int32)
    words = np.empty((0, -(-vocab_size // _WORD_BITS)), np.int32)
    if rows.masks is not None and len(rows.masks.rows):
        words = rows.masks.words
        lines[rows.masks.rows] = np.arange(len(words))
    # Rows of one request usually share one parameter object.
    packed: dict[int, Int32Array | None] = {}
    added: list[Int32Array] = []
    for row in np.flatnonzero(rows.params.adjusts_logits).tolist():
        constraints = rows.params[row].constraints
        if constraints is None:
            continue
        if id(constraints) not in packed:
            blocked = constraints.blocked(vocab_size)
            packed[id(constraints)] = None if blocked is None else _pack(~blocked, words.shape[1])
        allowed = packed[id(constraints)]
        if allowed is not None:
            added.append(allowed if lines[row] == _NONE else allowed & words[lines[row]])
            lines[row] = len(words) + len(added) - 1
    return lines, np.concatenate([words, np.stack(added)]) if added else words


def _pack(allowed: BoolArray, num_words: int) -> Int32Array:
    """Packs flags [V] into words [W]."""
    bits = np.zeros(num_words * _WORD_BITS, np.bool_)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def _biases(rows: SamplingRows) -> tuple[Int32Array, Int32Array, Float32Array]:
    """Returns starts [S + 1], tokens [E] and biases [E]; tokens forbidden for now have -inf."""
    counts = np.zeros(len(rows.params), np.int64)
    tokens: list[Int32Array] = [np.empty(0, np.int32)]
    values: list[Float32Array] = [np.empty(0, np.float32)]
    for row in np.flatnonzero(rows.params.adjusts_logits).tolist():
        params = rows.params[row]
        of_row, biases = params.biased_token_ids, params.biases
        forbidden = _forbidden(params, rows, row)
        if len(forbidden):
            all_tokens = np.union1d(of_row, forbidden).astype(np.int32)
            all_biases = np.zeros(len(all_tokens), np.float32)
            all_biases[np.searchsorted(all_tokens, of_row)] = biases
            all_biases[np.searchsorted(all_tokens, forbidden)] = -np.inf
            of_row, biases = all_tokens, all_biases
        counts[row] = len(of_row)
        tokens.append(of_row)
        values.append(biases)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return starts, np.concatenate(tokens), np.concatenate(values)


def _forbidden(params: SamplingParams, rows: SamplingRows, row: int) -> Int32Array:
    """Returns the tokens that the row must not sample in this step."""
    position = int(rows.positions[row])
    tokens: list[int] = []
    if params.min_tokens > position - int(rows.num_prompt_tokens[row]):
        tokens += params.suppressed_token_ids
    if params.has_phrases and params.constraints is not None:
        history = rows.histories[row]
        assert history is not None, "a row whose logits depend on its history has a history"
        tokens += params.constraints.forbidden_after(history, position)
    return np.array(tokens, np.int32)


def _penalties(rows: SamplingRows) -> tuple[Int32Array, Float32Array]:
    """Returns the count line of each row [S], -1 for none, and its penalties [S, 3]."""
    lines = np.full(len(rows.params), _NONE, np.int32)
    penalties = np.zeros((len(rows.params), 3), np.float32)
    if rows.counted is not None:
        lines[rows.counted.rows] = rows.counted.lines
        for row in rows.counted.rows.tolist():
            params = rows.params[row]
            penalties[row] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
    return lines, penalties
