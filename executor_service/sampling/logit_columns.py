"""What rows ask of their logits before temperature, as columns for a kernel; numpy only.

Shape letters: S rows that sample, V tokens of the vocabulary, G masks, W words of a mask, E biases
over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_service.sampling.sampler import SamplingRows
from executor_service.steps.sampling_params import SamplingParams
from executor_service.steps.step import BoolArray, Float32Array, Int32Array

_NONE = -1
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class LogitColumns:
    """See `AdjustColumns` of the kernel; `bias_starts`: [S + 1]. `penalties`: [S, 3]."""

    mask_lines: Int32Array
    mask_words: Int32Array
    bias_starts: Int32Array
    biased_tokens: Int32Array
    biases: Float32Array
    count_lines: Int32Array
    penalties: Float32Array

    @classmethod
    def of(cls, rows: SamplingRows, vocab_size: int) -> LogitColumns | None:
        """None if no row asks for anything now."""
        mask_lines, mask_words = _masks(rows, vocab_size)
        bias_starts, biased_tokens, biases = _biases(rows)
        count_lines, penalties = _penalties(rows)
        if not (len(mask_words) or len(biases) or np.count_nonzero(count_lines >= 0)):
            return None
        return cls(
            mask_lines, mask_words, bias_starts, biased_tokens, biases, count_lines, penalties
        )


def _masks(rows: SamplingRows, vocab_size: int) -> tuple[Int32Array, Int32Array]:
    """Of grammars, and of what rows may never sample. [S], [G, W]."""
    lines = np.full(len(rows.params), _NONE, np.int32)
    words = np.empty((0, -(-vocab_size // _WORD_BITS)), np.int32)
    if rows.masks is not None and len(rows.masks.rows):
        words = rows.masks.words
        lines[rows.masks.rows] = np.arange(len(words))
    # Rows of one request, as a rule, have the very same parameters.
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
    """[V] to [W]."""
    bits = np.zeros(num_words * _WORD_BITS, np.bool_)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def _biases(rows: SamplingRows) -> tuple[Int32Array, Int32Array, Float32Array]:
    """[S + 1], [E], [E]; what is forbidden for now has -inf."""
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
    """Tokens that may not come just now."""
    position = int(rows.positions[row])
    tokens: list[int] = []
    if params.min_tokens > position - int(rows.num_prompt_tokens[row]):
        tokens += params.suppressed_token_ids
    if params.has_phrases and params.constraints is not None:
        history = rows.histories[row]
        assert history is not None, "a row whose logits depend on its history has it"
        tokens += params.constraints.forbidden_after(history, position)
    return np.array(tokens, np.int32)


def _penalties(rows: SamplingRows) -> tuple[Int32Array, Float32Array]:
    """[S], [S, 3]."""
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
