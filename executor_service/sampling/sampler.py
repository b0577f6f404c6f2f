"""Logits to token ids, for all rows of a step at once.

The arithmetic is that of `SamplingParams` in `executor.proto`; its steps are spread over this file
(greedy, temperature), `logit_adjustments.py` (bias, penalties), `truncation.py` (top-k, min-p,
top-p) and `philox.py` (the number u).

Shape letters: S rows that sample, V tokens of the vocabulary, L blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from executor_service.device.host_copies import to_device
from executor_service.device.streams import streams_of
from executor_service.device.uploads import Uploads
from executor_service.sampling.logit_adjustments import adjust_logits
from executor_service.sampling.philox import uniform
from executor_service.sampling.token_counts import CountedRows, TokenCounts
from executor_service.sampling.truncation import truncate, truncate_unseen
from executor_service.steps.sampling_params import ParamRows
from executor_service.steps.step import Int32Array, Int64Array
from executor_service.steps.token_masks import TokenMasks
from splitserve_kernels.draw_rows import DrawRows

# The vocabulary is summed in blocks of this size before a token is looked for inside one block.
_BLOCK = 512
# Rows whose logits are adjusted at a time on a CPU. Their copy is small enough for memory that was
# used before: that of a whole step would be mapped, and unmapped, each time.
_ROWS_AT_A_TIME = 32
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows that sample.

    `params`, `histories`: S long; of a history, the first `positions[i]` tokens count. `seeds`: [S]
    int64. `positions`: [S] int32, the index in its sequence of the token to sample.
    `num_prompt_tokens`: [S] int32. `masks`: of those with a grammar, by their indexes here; None if
    there is none. `counted`: the counts of those with penalties; None if there is none, or they are
    to be counted from their histories.
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
        """The rows with penalties, rising indexes."""
        adjusts = self.params.adjusts_logits
        if not np.count_nonzero(adjusts):
            return _NO_ROWS
        rows = np.flatnonzero(adjusts).tolist()
        return np.array([row for row in rows if self.params[row].uses_penalties], np.int64)

    def with_counts(self, counts: TokenCounts, row_ids: Int32Array) -> SamplingRows:
        """With the counts of those that have penalties, as they are in `counts`.

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
        """Those of some rows on end."""
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
    """`rows` as a kernel is told of them."""
    params = rows.params
    return DrawRows(
        temperatures=params.temperatures,
        top_k=params.top_k(vocab_size),
        top_p=params.top_p,
        min_p=params.min_p,
        seeds=rows.seeds.astype(np.int64),
        positions=rows.positions.astype(np.int64),
    )


# Adjusted logits [S, V] float32 and their rows -> token ids [S] int32, -1 where invalid, on the
# device of the logits.
Draw = Callable[[Tensor, SamplingRows], Tensor]
# Logits [S, V] float32, their rows, and how large arrays reach their device -> adjusted ones; a
# copy where they differ.
Adjust = Callable[[Tensor, SamplingRows, Uploads], Tensor]
# Scaled logits and their rows -> weights, 0 for what is cut.
Truncate = Callable[[Tensor, ParamRows], Tensor]


def sample(
    logits: Tensor,
    rows: SamplingRows,
    draw: Draw | None = None,
    adjust: Adjust | None = None,
    uploads: Uploads | None = None,
) -> Tensor:
    """Chooses one token for each row. `logits`: [S, V] float32, not changed.

    `adjust` applies masks, biases and penalties, and `draw` chooses then; plain torch where they
    are None. `uploads`: to the device of `logits`; None for some of its own. Returns [S] int32
    there: -1 where no token can be told, because a row of logits has NaN or +inf, or -inf alone.
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
        drawn = draw(adjust(of_part, rows_of_part, uploads), rows_of_part)
        # Suppression may have hidden an infinity.
        token_ids.append(torch.where(torch.isfinite(of_part.amax(dim=-1)), drawn, -1))
    return torch.cat(token_ids)


def adjust_in_torch(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    """Steps 1 and 2 of `SamplingParams` in `executor.proto`."""
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
    """Chooses the largest logit of each row, or draws where it has a temperature.

    The host looks at what was found on the way: this is for logits on a CPU.
    """
    return _draw_with(truncate, adjusted, rows)


def draw_unseen_in_torch(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """As `draw_in_torch`, but the host looks at nothing, so it does not wait for a device."""
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
        # Of invalid rows it is some id below V.
        token_ids[selected] = _draw(weights, u)
    return torch.where(torch.isfinite(largest), token_ids, -1).to(torch.int32)


def _scale(adjusted: Tensor, largest: Tensor, selected: Tensor, temperatures: np.ndarray) -> Tensor:
    """Logits of the selected rows over their temperature, the largest of each row at 0."""
    # Softmax does not see a shift, and shifting first cannot overflow at a tiny temperature.
    shifted = adjusted[selected] - largest[selected, None]
    return shifted / to_device(temperatures, adjusted.device)[:, None]


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """The first token id at which the running sum of the weights exceeds u times their total.

    `weights`: [S, V] float32, >= 0. `u`: [S] float64. Sums are float64. Returns [S] int64. Rows
    with NaN get some id below V.
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
    """Index of the first running sum > target; [S, n], [S], [S, n] -> [S] int64.

    Rounding may leave none above: then the last part that is not empty.
    """
    first = (running <= target[:, None]).sum(dim=-1)
    last = parts.shape[-1] - 1 - (parts > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(first, last)
