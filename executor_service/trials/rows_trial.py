"""Trials of models that return vectors of whole texts.

Rows side by side must have the states that each has alone in the model's own code. With packed
matrices the vectors must stay the same.

Shape letters: L tokens of a row, W width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor_service.errors import TrialFailed
from executor_service.model import LoadedModel, TextModel, TextRow, UncachedModel
from executor_service.steps import PoolingParams, PoolingTask
from executor_service.trials.layer_trial import (
    FLOAT32_TOLERANCE,
    TOKENS_PAST_WINDOW,
    cut_to_float32,
    near_tokens,
    relative_error,
)
from executor_service.trials.model_trial import rounded_matrices
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


@torch.inference_mode()
def try_vectors(loaded: LoadedModel, change: Callable[[], None], *, is_int8: bool) -> None:
    """Compares the vectors of `loaded`, which is uncached, before and after `change`.

    `is_int8`: `change` rounds the matrices, and so does the reference. Raises TrialFailed if the
    vectors differ, or if anything raises.
    """
    parts, vectors = loaded.vector_parts, loaded.vectors
    assert parts is not None, "the model returns vectors"
    assert parts.uncached is not None, "the model is uncached"
    assert vectors is not None, "the model returns vectors"
    task = PoolingTask.SCORES if vectors.labels else PoolingTask.EMBEDDING
    texts = _rows(loaded.model, min(_LONG, loaded.max_model_len))
    # Raw, since an activation might hide differences.
    rows = [(text.token_ids, PoolingParams(task, raw=True)) for text in texts]
    compute = partial(_vectors, parts.uncached, rows)
    allowed = FLOAT32_TOLERANCE if loaded.dtype == torch.float32 else _TOLERANCE_IN_16_BITS
    with trial_failures():
        with rounded_matrices(loaded.model) if is_int8 else nullcontext():
            expected = compute()
        change()
        Trial(
            reference=lambda _: expected,
            candidate=lambda _: compute(),
            cases=(rows,),
            error_of=lambda _, right, actual: _largest_error(right, actual),
            allowed=allowed,
            complaint=lambda error: (
                f"relative error of the vectors {error:.2g}, allowed {allowed:.2g}"
            ),
        ).check()


def _vectors(model: UncachedModel, rows: Sequence[tuple[Tensor, PoolingParams]]) -> Tensor:
    """Returns the vectors of `rows`, [R, N]. Raises TrialFailed if one has none."""
    found = model.vectors(rows)
    vectors = [each for each in found if not isinstance(each, str)]
    if len(vectors) < len(found):
        raise TrialFailed(next(each for each in found if isinstance(each, str)))
    return torch.stack(vectors)


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
    return max(*of_states, _largest_error(expected[1], actual[1]))


def _largest_error(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest difference, divided by the largest number expected."""
    scale = expected.abs().amax().clamp(min=1e-6)
    return float(((actual - expected).abs() / scale).amax())
