"""Results of steps as a newer or broken executor may send them: one change each, drawn at random.

What a change may cost is in its name: `row` (that row's request may end with an error), `step` (its
rows are computed again), `anything` (the executor may be given up as well).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from splitserve.executor.v1 import executor_pb2 as pb

_ODD_INTS = (-(2**31), -7, -1, 0, 1, 5, 96, 97, 98, 1000, 2**31 - 1)
_ODD_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.5, 3e38, -1.0)
# Of a later version, too.
_STATUSES: tuple[Any, ...] = (0, 2, 3, 4, 5, 9, 2**31 - 1)
_REASONS: tuple[Any, ...] = (0, 4, 13, 14, 15, 99, -3)
_COLUMNS = ("row_indexes", "positions", "token_ids", "ranks", "top_offsets", "top_token_ids")
_ODD_BYTES = (b"", b"\x01", b"\xff" * 4, b"\x00" * 12, bytes(range(64)))

Mutation = Callable[[Random, pb.StepResult], None]


def status_of_the_step(random: Random, result: pb.StepResult) -> None:
    result.status = random.choice(_STATUSES)
    result.error.reason = random.choice(_REASONS)
    result.error.message = "é" * random.randrange(3)


def status_of_a_row(random: Random, result: pb.StepResult) -> None:
    num_rows = len(_offsets(result)) - 1
    statuses = bytearray(result.row_statuses or b"\x01" * num_rows)
    for _ in range(min(num_rows, random.randint(1, 2))):
        statuses[random.randrange(num_rows)] = random.choice([0, 2, 3, 4, 5, 9, 255])
    result.row_statuses = bytes(statuses)


def sampled_token(random: Random, result: pb.StepResult) -> None:
    result.sampled_token_ids = _with_odd(random, result.sampled_token_ids, "<i4", _ODD_INTS)


def sampled_token_out_of_range(random: Random, result: pb.StepResult) -> None:
    odd = (-(2**31), -1, 2**31 - 1)
    result.sampled_token_ids = _with_odd(random, result.sampled_token_ids, "<i4", odd)


def number_of_tokens(random: Random, result: pb.StepResult) -> None:
    """A row that has tokens has none, or far more than it may."""
    offsets, tokens = _offsets(result), np.frombuffer(result.sampled_token_ids, "<i4")
    counts = np.diff(offsets)
    # Without offsets, who has no token has -1.
    rows = np.flatnonzero((counts > 0) & (tokens[offsets[:-1].clip(max=len(tokens) - 1)] >= 0))
    if not len(rows):
        return
    row = random.choice(rows.tolist())
    start, end = int(offsets[row]), int(offsets[row + 1])
    changed = np.resize(tokens[start:end], random.choice([0, 1000]))
    result.sampled_token_ids = np.concatenate([tokens[:start], changed, tokens[end:]]).tobytes()
    counts[row] = len(changed)
    result.sampled_offsets = np.cumsum([0, *counts]).astype("<i4").tobytes()


def score(random: Random, result: pb.StepResult) -> None:
    scores = random.choice([result.logprobs, result.prompt_logprobs])
    if random.random() < 0.4:
        name = random.choice(["logprobs", "top_logprobs"])
        setattr(scores, name, _with_odd(random, getattr(scores, name), "<f4", _ODD_FLOATS))
    else:
        name = random.choice(_COLUMNS)
        setattr(scores, name, _with_odd(random, getattr(scores, name), "<i4", _ODD_INTS))


def missing_scores(random: Random, result: pb.StepResult) -> None:
    result.ClearField(random.choice(["logprobs", "prompt_logprobs"]))


def timings(random: Random, result: pb.StepResult) -> None:
    result.timings.move_us = random.choice([-(2**63), -1, 2**63 - 1])
    result.timings.forward_us = random.choice([-(2**63), -1, 2**63 - 1])


def row_error(random: Random, result: pb.StepResult) -> None:
    result.row_errors.add(row_index=random.choice(_ODD_INTS), message="x" * random.randrange(2000))


def column_of_any_length(random: Random, result: pb.StepResult) -> None:
    name = random.choice(
        [
            "row_statuses",
            "sampled_token_ids",
            "sampled_offsets",
            *(f"logprobs.{c}" for c in _COLUMNS),
        ]
    )
    *parents, field = name.split(".")
    message = getattr(result, parents[0]) if parents else result
    setattr(message, field, random.choice(_ODD_BYTES))


def number_of_the_step(random: Random, result: pb.StepResult) -> None:
    result.step_id += random.choice([-1, 1, 2, -(2**40), 2**40, -result.step_id])


def any_byte(random: Random, result: pb.StepResult) -> None:
    data = bytearray(result.SerializeToString())
    for _ in range(random.randint(1, 3)):
        data[random.randrange(len(data))] = random.randrange(256)
    changed = pb.StepResult()
    try:
        changed.ParseFromString(bytes(data))
    except DecodeError:  # gRPC would not let it through either
        return
    result.CopyFrom(changed)


COSTS: dict[Mutation, str] = {
    timings: "nothing",
    row_error: "nothing",
    status_of_a_row: "row",
    sampled_token: "row",
    number_of_tokens: "row",
    score: "row",
    missing_scores: "row",
    status_of_the_step: "anything",
    column_of_any_length: "anything",
    number_of_the_step: "anything",
    any_byte: "anything",
}


def _offsets(result: pb.StepResult) -> npt.NDArray[np.int32]:
    """Offsets of the tokens of each row, and the end of the last."""
    if not result.sampled_offsets:
        return np.arange(len(result.sampled_token_ids) // 4 + 1, dtype=np.int32)
    return np.frombuffer(result.sampled_offsets, "<i4")


def _with_odd(random: Random, column: bytes, dtype: str, odd: tuple[float, ...]) -> bytes:
    values = np.frombuffer(column, dtype).copy()
    if len(values):
        values[random.randrange(len(values))] = random.choice(odd)
    return values.tobytes()
