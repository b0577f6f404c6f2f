"""Masks, biases and penalties by Triton's kernel: one copy to the device, and one launch.

Shape letters: S rows that sample, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from executor_service.device.uploads import Numbers, Uploads
from executor_service.sampling.logit_columns import LogitColumns
from executor_service.sampling.sampler import SamplingRows
from executor_service.sampling.token_counts import IN_PROMPT
from splitserve_kernels.gpu.sampling.adjust import AdjustColumns, adjust


def triton_adjust(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    """As `adjust_in_torch`, to the bit."""
    columns = LogitColumns.of(rows, logits.shape[1])
    if columns is None:
        return logits
    numbers = [
        columns.mask_lines,
        columns.mask_words,
        columns.bias_starts,
        columns.biased_tokens,
        columns.count_lines,
        columns.biases.view("int32"),
        columns.penalties.view("int32"),
    ]
    _, (mask_lines, mask_words, bias_starts, biased_tokens, count_lines, *floats) = uploads.send(
        Numbers([], numbers)
    )
    biases, penalties = (tensor.view(torch.float32) for tensor in floats)
    return adjust(
        logits,
        AdjustColumns(
            mask_lines=mask_lines,
            mask_words=mask_words,
            bias_starts=bias_starts,
            biased_tokens=biased_tokens,
            biases=biases,
            count_lines=count_lines,
            # Of something where nobody has any.
            counts=count_lines if rows.counted is None else rows.counted.table,
            penalties=penalties,
            output_bits=IN_PROMPT - 1,
        ),
    )
