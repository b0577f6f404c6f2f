"""The trials of kernels beside attention, played with plain torch on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_service.backends import tried_kernel
from executor_service.device import CopyBlocks, Uploads, copy_in_torch
from executor_service.errors import TrialFailed
from executor_service.sampling import Adjust, Draw, SamplingRows, adjust_in_torch, draw_in_torch
from executor_service.steps import ParamRows, SamplingParams
from executor_service.trials import try_adjust, try_copy, try_draw

CPU = torch.device("cpu")


def _next_token(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """Of rows that have one."""
    token_ids = draw_in_torch(adjusted, rows)
    return torch.where(token_ids > 0, token_ids - 1, token_ids)


def _largest(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    count = len(rows.params)
    greedy = ParamRows.of([SamplingParams(temperature=0.0)] * count)
    return draw_in_torch(adjusted, replace(rows, params=greedy))


def _uncut(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    temperatures = rows.params.temperatures.tolist()
    params = ParamRows.of([SamplingParams(temperature=t) for t in temperatures])
    return draw_in_torch(adjusted, replace(rows, params=params))


def _unmarked(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    return draw_in_torch(adjusted.nan_to_num(), rows)


def _narrow_seeds(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    return draw_in_torch(adjusted, replace(rows, seeds=rows.seeds & 0xFFFFFFFF))


def _in_wrong_rows(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    return draw_in_torch(adjusted, rows).roll(1)


def _rarely_from_the_second_half(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    half = adjusted.clone()
    half[:, adjusted.shape[1] // 2 :] -= 4.0
    return draw_in_torch(half, rows)


@pytest.mark.parametrize(
    "draw",
    [
        _next_token,
        _largest,
        _uncut,
        _unmarked,
        _narrow_seeds,
        _in_wrong_rows,
        _rarely_from_the_second_half,
    ],
)
@pytest.mark.parametrize("vocab_size", [700, 9001])
def test_try_draw_raises_when_tokens_are_others(draw: Draw, vocab_size: int) -> None:
    with pytest.raises(TrialFailed, match="token"):
        try_draw(draw, vocab_size, CPU)


def _with_noise(adjusted: Tensor, rows: SamplingRows) -> Tensor:
    """As exact as another approximation of exp."""
    noise = torch.rand(adjusted.shape, generator=torch.Generator().manual_seed(0))
    is_random = torch.from_numpy(rows.params.temperatures > 1e-3)[:, None]
    return draw_in_torch(torch.where(is_random, adjusted + 1e-7 * noise, adjusted), rows)


@pytest.mark.parametrize("draw", [draw_in_torch, _with_noise])
@pytest.mark.parametrize("vocab_size", [1, 3, 9001])
def test_try_draw_passes_when_tokens_are_right_but_for_rounding(
    draw: Draw, vocab_size: int
) -> None:
    assert try_draw(draw, vocab_size, CPU) <= 1e-5


def _without(**others: object) -> Adjust:
    """Leaves something out that rows ask for."""

    def adjust(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
        params = [replace(params, **others) for params in rows.params.objects.tolist()]
        return adjust_in_torch(logits, replace(rows, params=ParamRows.of(params)), uploads)

    return adjust


def _without_masks(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    return adjust_in_torch(logits, replace(rows, masks=None), uploads)


def _in_place(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    return logits.copy_(adjust_in_torch(logits, rows, uploads))


def _but_the_last_token(logits: Tensor, rows: SamplingRows, uploads: Uploads) -> Tensor:
    adjusted = adjust_in_torch(logits, rows, uploads)
    adjusted[:, -1] = logits[:, -1]
    return adjusted


@pytest.mark.parametrize(
    "adjust",
    [
        _without(repetition_penalty=1.0),
        _without(frequency_penalty=0.0),
        _without(presence_penalty=0.0),
        _without(logit_bias={}),
        _without(min_tokens=0),
        _without(allowed_token_ids=()),
        _without_masks,
        _in_place,
        _but_the_last_token,
    ],
)
@pytest.mark.parametrize("vocab_size", [700, 9001])
def test_try_adjust_raises_when_logits_are_others(adjust: Adjust, vocab_size: int) -> None:
    with pytest.raises(TrialFailed, match="logits"):
        try_adjust(adjust, vocab_size, CPU)


def test_try_adjust_passes_when_torch_adjusts() -> None:
    try_adjust(adjust_in_torch, 9001, CPU)


def _first_only(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    copy_in_torch(pool, sources[:1], destinations[:1])


def _backwards(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    copy_in_torch(pool, destinations, sources)


def _all_but_the_end(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    ends = pool[destinations, -1]
    copy_in_torch(pool, sources, destinations)
    pool[destinations, -1] = ends


@pytest.mark.parametrize("copy", [_first_only, _backwards, _all_but_the_end])
def test_try_copy_raises_when_blocks_hold_something_else(copy: CopyBlocks) -> None:
    with pytest.raises(TrialFailed, match="of 40 blocks have wrong contents"):
        try_copy(copy, CPU)


def test_try_copy_passes_when_torch_copies() -> None:
    try_copy(copy_in_torch, CPU)


def _nothing() -> None:
    """Passes any trial."""


def _refuse(_kernel: Callable[[], None]) -> None:
    raise TrialFailed("all is 1")


def _in_torch() -> None:
    """Replaces a kernel."""


def _missing() -> Callable[[], None]:
    raise ImportError("no triton")


@pytest.mark.parametrize(
    ("make", "trial", "reason"),
    [
        (lambda: _nothing, _refuse, "all is 1"),
        (_missing, lambda _: None, "ImportError: no triton"),
        (lambda: _nothing, lambda _: None, None),
    ],
    ids=["wrong", "cannot be made", "right"],
)
def test_tried_kernel_falls_back_to_torch_when_it_fails(
    make: Callable[[], Callable[[], None]],
    trial: Callable[[Callable[[], None]], None],
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = tried_kernel("some", make, trial, _in_torch)
    assert kernel is (_in_torch if reason else _nothing)
    error = f"kernel_refused kernel=some reason='{reason}': using plain torch"
    assert caplog.messages == ([error] if reason else [])
    assert all(record.levelno == logging.ERROR for record in caplog.records)
