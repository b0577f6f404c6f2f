"""Sampled tokens that stay on the device, for steps that begin before the host has them.

What is written and read here is asked of the compute stream, so it is done in the order of the
steps, and nobody waits.

Shape letters: S rows that sample, A rows whose input token is awaited.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from executor_service.device.uploads import Numbers, Uploads
from executor_service.steps.step import Int32Array, Int64Array, StepInput


class SampledTokens:
    """A token for each row id of each step that is kept."""

    def __init__(self, uploads: Uploads) -> None:
        """`uploads`: to the device of the tokens."""
        self._uploads = uploads
        self._of_steps: dict[int, Tensor] = {}

    def keep(self, step: StepInput, rows: Int64Array, token_ids: Tensor) -> None:
        """`token_ids` [S] int32 are what `rows` [S] of `step` sample, -1 for none.

        Whatever has none gets some token of the vocabulary.
        """
        kept = torch.zeros(int(step.row_ids.max()) + 1, dtype=torch.int64, device=token_ids.device)
        ((row_ids,), _) = self._uploads.send(Numbers([step.row_ids[rows].astype(np.int64)], []))
        kept.index_copy_(0, row_ids, token_ids.to(torch.int64).clamp(min=0))
        self._of_steps[step.step_id] = kept

    def forget(self, step_id: int) -> None:
        """Gives its memory back, if it was kept."""
        self._of_steps.pop(step_id, None)

    def find(self, step_ids: Int64Array, row_ids: Int32Array) -> tuple[Tensor, Int64Array]:
        """What each of `row_ids` [A] sampled in the step beside it [A].

        Returns tokens, int64 on the device, and which of these it is: [A] int64. All of these
        steps are kept.
        """
        distinct, which = np.unique(step_ids, return_inverse=True)
        parts = [self._of_steps[step_id] for step_id in distinct.tolist()]
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tokens, np.asarray(row_ids + starts[which], np.int64)
