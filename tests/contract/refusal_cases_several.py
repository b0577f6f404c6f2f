"""Wrong batches with what contract 1.4 added: rows that may get several tokens in one step."""

from __future__ import annotations

from collections.abc import Callable

from splitserve.executor.v1 import executor_pb2 as pb
from tests.contract.refusal_case import Case, params, work
from tests.contract.served import MAX_NUM_BATCHED_TOKENS, PROMPT, VOCAB_SIZE
from tests.support.steps.batches import Sender, WorkRow, i32

_RUNS, _DRAFTS, _OFFSETS = "work.num_run_on_tokens", "work.draft_token_ids", "work.draft_offsets"
# Row 0 goes on from its prompt; its block table ends at position 11.
_NEXT, _LAST = len(PROMPT), 11


def _row(**more: object) -> Callable[[Sender], pb.ScheduleBatch]:
    return work(WorkRow(0, _NEXT, [9], **more))  # type: ignore[arg-type]


def _set(**columns: bytes) -> Callable[[Sender], pb.ScheduleBatch]:
    def make(sender: Sender) -> pb.ScheduleBatch:
        batch = sender.batch(2, base=1, work=[WorkRow(0, _NEXT, [9])])
        for name, column in columns.items():
            setattr(batch.work, name, column)
        return batch

    return make


# For an executor that does not announce the feature.
UNANNOUNCED_SEVERAL_CASES = [
    Case("run", "FEATURE_UNSUPPORTED", _RUNS, _row(run_on=2)),
    Case("run of no tokens", "FEATURE_UNSUPPORTED", _RUNS, _set(num_run_on_tokens=i32([0]))),
    Case("drafts", "FEATURE_UNSUPPORTED", _OFFSETS, _row(drafts=(1, 2))),
    Case(
        "stop tokens",
        "FEATURE_UNSUPPORTED",
        "new_rows.sampling_params[0].stop_token_ids",
        params(stop_token_ids=[2]),
    ),
]

SEVERAL_CASES = [
    Case("negative run", "MALFORMED", _RUNS, _set(num_run_on_tokens=i32([-1]))),
    Case("too many runs", "MALFORMED", _RUNS, _set(num_run_on_tokens=i32([1, 1]))),
    Case("run without a sample", "MALFORMED", _RUNS, _row(run_on=1, samples=False)),
    Case(
        "run beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _row(run_on=_LAST - _NEXT + 1),
    ),
    Case(
        "drafts and run beyond the table",
        "POSITION_OUT_OF_RANGE",
        "work.num_computed_tokens",
        _row(run_on=_LAST - _NEXT - 1, drafts=(1, 2)),
    ),
    Case("draft out of range", "TOKEN_OUT_OF_RANGE", _DRAFTS, _row(drafts=(VOCAB_SIZE,))),
    Case("drafts without a sample", "MALFORMED", _OFFSETS, _row(drafts=(1,), samples=False)),
    Case("drafts without offsets", "MALFORMED", _DRAFTS, _set(draft_token_ids=i32([1]))),
    Case(
        "offsets of other drafts",
        "MALFORMED",
        _OFFSETS,
        _set(draft_offsets=i32([0, 2]), draft_token_ids=i32([1])),
    ),
    Case("broken run column", "MALFORMED", _RUNS, _set(num_run_on_tokens=b"123")),
    Case(
        "too many drafts",
        "LIMIT_EXCEEDED",
        _OFFSETS,
        _row(drafts=(1,) * MAX_NUM_BATCHED_TOKENS),
    ),
    Case(
        "stop token out of range",
        "TOKEN_OUT_OF_RANGE",
        "new_rows.sampling_params[0].stop_token_ids",
        params(stop_token_ids=[VOCAB_SIZE]),
    ),
]
