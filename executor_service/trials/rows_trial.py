"""Trial of rows side by side: each must have the states that it has alone in the model's own code.

Shape letters: L tokens of a row, W width of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor_service.errors import TrialFailed
from executor_service.model import TextModel, TextRow
from executor_service.trials.layer_trial import (
    FLOAT32_TOLERANCE,
    TOKENS_PAST_WINDOW,
    cut_to_float32,
    near_tokens,
    relative_error,
)
from executor_service.trials.trial import Trial, trial_failures

# Tokens of short rows, and of the longest row if no window is longer.
_SHORT = (1, 5, 5, 12)
_LONG = 96
# A window up to this size is tried past its end.
_MAX_TRIED_WINDOW = 1024
# Without memory for float32. Unrelated states differ by 1.4.
_TOLERANCE_IN_16_BITS = 0.1


@torch.inference_mode()
def try_rows(model: TextModel) -> None:
    """Switches `model` to rows side by side and compares them with its own code.

    Raises TrialFailed if they differ, or if the model cannot compute rows side by side.
    """
    if not model.can_be_flat:
        raise TrialFailed("its code takes no positions")
    with trial_failures():
        model.switch(is_flat=True)
        model.outputs([TextRow(torch.tensor([3, 4]))])
    modules, windows = model.attended
    if not modules:
        raise TrialFailed("it bypasses transformers' attention interface")
    longest = max([_LONG, *(window + TOKENS_PAST_WINDOW for window in windows)])
    longest = min(longest, model.max_model_len)
    if longest > _MAX_TRIED_WINDOW + TOKENS_PAST_WINDOW:
        raise TrialFailed(f"its sliding window of {max(windows)} tokens is too long to be tried")
    model.switch(is_flat=False)
    cut = cut_to_float32(model.whole, modules)
    tried = model if cut is None else model.like(cut)
    rows = _rows(tried.whole, longest)
    tried.switch(is_flat=False)
    states = [tried.own_states(row).float() for row in rows]
    outputs = torch.cat([tried.outputs([row]) for row in rows])
    tried.switch(is_flat=True)
    tolerance = _TOLERANCE_IN_16_BITS if cut is None else FLOAT32_TOLERANCE
    with trial_failures():
        Trial(
            reference=lambda _: (states, outputs),
            candidate=lambda _: (_split(tried.states(rows).float(), rows), tried.outputs(rows)),
            cases=(rows,),
            error_of=lambda _, expected, actual: _error(expected, actual),
            allowed=tolerance,
            complaint=lambda error: (
                f"rows side by side have other states than alone (relative error {error:.2g},"
                f" allowed {tolerance:.2g})"
            ),
        ).check()
    model.switch(is_flat=True)


def _rows(whole: Any, longest: int) -> list[TextRow]:  # noqa: ANN401
    text_config = whole.config.get_text_config(decoder=True)
    tokens = near_tokens(whole, text_config, longest, longest).tokens.cpu()
    lengths = sorted(min(length, longest) for length in (*_SHORT, longest // 2 or 1, longest))
    # The last of equal ones has two texts, where a model tells them apart.
    return [
        TextRow(tokens[index % 2, :length], length // 2) for index, length in enumerate(lengths)
    ]


def _split(states: Tensor, rows: list[TextRow]) -> list[Tensor]:
    return list(torch.split(states, [len(row.token_ids) for row in rows]))


def _error(expected: tuple[list[Tensor], Tensor], actual: tuple[list[Tensor], Tensor]) -> float:
    """Returns the largest relative error of hidden states [L, W] and of outputs."""
    pairs = zip(expected[0], actual[0], strict=True)
    of_states = [relative_error(right[None], found[None]) for right, found in pairs]
    scale = expected[1].abs().amax().clamp(min=1e-6)
    of_outputs = float(((actual[1] - expected[1]).abs() / scale).amax())
    return max(*of_states, of_outputs)
