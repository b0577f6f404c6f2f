"""Changes of logits before temperature: masks, suppressed tokens, constraints, bias, penalties.

Shape letters: S rows that sample, V tokens of the vocabulary, G rows with a mask, W words of a
mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_service.device import IntegerArrays, Uploads, streams_of, to_device
from executor_service.sampling.token_counts import IN_PROMPT, CountedRows
from executor_service.steps import BoolArray, Int32Array, ParamRows, TokenMasks

# Rows that are masked or penalised at a time; temporaries are as large as the logits of these rows.
_ROWS_AT_A_TIME = 32


def adjust_logits(
    logits: Tensor,
    params: ParamRows,
    positions: Int32Array,
    num_prompt_tokens: Int32Array,
    histories: Sequence[Sequence[int] | None],
    masks: TokenMasks | None = None,
    counted: CountedRows | None = None,
    uploads: Uploads | None = None,
) -> Tensor:
    """Applies steps 1 and 2 of `SamplingParams` in `executor.proto`.

    `logits`: [S, V] float32. `positions`: [S] int32, number of tokens before the one to sample.
    `num_prompt_tokens`: [S] int32. `histories`: S long, None for rows that need none. `masks`: by
    indexes of the S rows. `counted`: counts of all rows with penalties; None if there are none.
    `uploads`: to the device; None to create some. Returns `logits` itself if no row needs a change,
    otherwise a changed copy.
    """
    adjusting = np.flatnonzero(params.adjusts_logits).tolist()
    num_output_tokens = positions - num_prompt_tokens
    suppressing = [
        row
        for row in adjusting
        if params[row].suppressed_token_ids and params[row].min_tokens > num_output_tokens[row]
    ]
    constrained = [row for row in adjusting if params[row].constraints is not None]
    biased = [row for row in adjusting if params[row].logit_bias]
    penalized = counted is not None and len(counted.rows) > 0
    masked = masks is not None and len(masks.rows) > 0
    if not (masked or suppressing or constrained or biased or penalized):
        return logits
    uploads = uploads or Uploads(logits.device, streams_of(logits.device))
    logits = logits.clone(memory_format=torch.contiguous_format)
    if masks is not None and masked:
        if logits.device.type == "cpu":
            _mask_on_host(logits, masks)
        else:
            _mask_on_device(logits, masks, uploads)
    if suppressing:
        token_ids = [params[row].suppressed_token_ids for row in suppressing]
        _forbid(logits, suppressing, token_ids, uploads)
    if constrained:
        _constrain(logits, constrained, params, positions, histories, uploads)
    if biased:
        _add_bias(logits, biased, params, uploads)
    if counted is not None and penalized:
        _penalize(logits, params, counted)
    return logits


def _mask_on_host(logits: Tensor, masks: TokenMasks) -> None:
    """Sets logits of tokens that `masks` do not allow to -inf, in `logits` [S, V], in place."""
    num_words, vocab_size = masks.words.shape[1], logits.shape[1]
    bounds = np.empty((4 * num_words, 8), np.float32)
    bounds_of_row = torch.from_numpy(bounds.reshape(-1)[:vocab_size])
    for row, words in zip(masks.rows.tolist(), masks.words.view(np.uint8), strict=True):
        # The clip mode skips a bounds check: every byte is a valid index.
        np.take(_BOUNDS, words, axis=0, out=bounds, mode="clip")
        torch.minimum(logits[row], bounds_of_row, out=logits[row])


def _bounds_of_bytes() -> npt.NDArray[np.float32]:
    """Returns [256, 8]: upper bounds of 8 logits for each byte of mask bits, lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.inf, -np.inf).astype(np.float32)


_BOUNDS = _bounds_of_bytes()


def _mask_on_device(logits: Tensor, masks: TokenMasks, uploads: Uploads) -> None:
    """Sets logits of tokens that `masks` do not allow to -inf, in `logits` [S, V], in place."""
    for start in range(0, len(masks.rows), _ROWS_AT_A_TIME):
        end = start + _ROWS_AT_A_TIME
        blocked = unpack_words(uploads.send_array(masks.words[start:end]), logits.shape[1])
        rows = masks.rows[start:end]
        if rows[-1] - rows[0] == len(rows) - 1:
            # The usual case, in which the rows are adjacent: a view.
            logits[rows[0] : rows[-1] + 1].masked_fill_(blocked, -torch.inf)
        else:
            selected = to_device(rows, logits.device)
            logits[selected] = logits[selected].masked_fill_(blocked, -torch.inf)


def unpack_words(words: Tensor, vocab_size: int) -> Tensor:
    """Converts words [G, W] int32 to a mask [G, V] bool: True for tokens that are not allowed."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits_of_words = (words[:, :, None] >> shifts) & 1
    return bits_of_words.flatten(1)[:, :vocab_size] == 0


def _constrain(
    logits: Tensor,
    constrained: Sequence[int],
    params: ParamRows,
    positions: Int32Array,
    histories: Sequence[Sequence[int] | None],
    uploads: Uploads,
) -> None:
    """Applies the constraints of the rows in `constrained` to `logits` [S, V], in place."""
    # Rows of one request usually share one parameter object.
    by_params: dict[int, list[int]] = {}
    for row in constrained:
        by_params.setdefault(id(params[row]), []).append(row)
    phrase_rows: list[int] = []
    forbidden: list[list[int]] = []
    for rows in by_params.values():
        constraints = params[rows[0]].constraints
        assert constraints is not None, "all rows have constraints"
        _block(logits, rows, constraints.blocked(logits.shape[1]), uploads)
        if constraints.phrases:
            phrase_rows += rows
            forbidden += [
                constraints.forbidden_after(_known(histories[row]), int(positions[row]))
                for row in rows
            ]
    if any(forbidden):
        _forbid(logits, phrase_rows, forbidden, uploads)


def _block(
    logits: Tensor, rows: Sequence[int], blocked: BoolArray | None, uploads: Uploads
) -> None:
    """Sets the tokens `blocked` [V] to -inf in `rows` of `logits` [S, V], in place."""
    if blocked is None:
        return
    mask = uploads.send_array(blocked)
    if len(rows) == len(logits):
        logits.masked_fill_(mask, -torch.inf)
        return
    # One by one: gathering the rows and putting them back would double their memory.
    for row in rows:
        logits[row].masked_fill_(mask, -torch.inf)


def _add_bias(logits: Tensor, biased: Sequence[int], params: ParamRows, uploads: Uploads) -> None:
    """Adds the `logit_bias` of the rows in `biased` to `logits` [S, V], in place."""
    token_ids = [list(params[row].logit_bias) for row in biased]
    values = [value for row in biased for value in params[row].logit_bias.values()]
    bias = uploads.send_array(np.array(values, dtype=np.float32))
    # Each token occurs once in a row, so no element is added to twice.
    logits[_pairs(biased, token_ids, uploads)] += bias


def _penalize(logits: Tensor, params: ParamRows, counted: CountedRows) -> None:
    """Applies the penalties of the rows in `counted` to `logits` [S, V], in place."""
    rows, lines = (to_device(c, logits.device) for c in (counted.rows, counted.lines))
    penalties = np.array(
        [
            (row.repetition_penalty, row.frequency_penalty, row.presence_penalty)
            for row in (params[row] for row in counted.rows.tolist())
        ],
        dtype=np.float32,
    )
    repetition, frequency, presence = to_device(penalties, logits.device)[:, :, None].unbind(1)
    # On a CPU, one row at a time stays in its caches.
    size = 1 if logits.device.type == "cpu" else _ROWS_AT_A_TIME
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        counts, before = counted.table[lines[part]], logits[rows[part]]
        repeated = torch.where(before > 0, before / repetition[part], before * repetition[part])
        after = torch.where(counts > 0, repeated, before)
        in_output = counts & (IN_PROMPT - 1)
        after -= frequency[part] * in_output
        logits[rows[part]] = after.sub_(presence[part] * (in_output > 0))


def _known(history: Sequence[int] | None) -> Sequence[int]:
    assert history is not None, "a row whose logits depend on its history has a history"
    return history


def _forbid(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[Sequence[int]], uploads: Uploads
) -> None:
    """Sets all given tokens of all rows to -inf in `logits` [S, V], contiguous, in place."""
    of_rows, tokens = _pairs(rows, token_ids, uploads)
    # Assigning a number would copy it to the device and wait for the copy.
    logits.view(-1).index_fill_(0, of_rows * logits.shape[1] + tokens, -torch.inf)


def _pairs(
    rows: Sequence[int], token_ids: Sequence[Sequence[int]], uploads: Uploads
) -> tuple[Tensor, Tensor]:
    """Returns indexes (row, token) of all tokens of all rows; both [number of pairs] int64."""
    lengths = [len(tokens) for tokens in token_ids]
    flat = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in token_ids])
    (of_rows, tokens), _ = uploads.send(
        IntegerArrays([np.repeat(np.asarray(rows), lengths), flat], [])
    )
    return of_rows, tokens
