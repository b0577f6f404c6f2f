from __future__ import annotations

from scheduler_service.journal.replay import find_difference
from splitserve.executor.v1 import executor_pb2 as executor
from splitserve.scheduler.v1 import journal_pb2 as pb


def test_difference_tells_element_and_both_values_when_a_column_differs() -> None:
    ours = executor.ScheduleBatch(step_id=4, work=executor.Work(row_ids=b"\1\0\0\0\5\0\0\0"))
    theirs = executor.ScheduleBatch(step_id=4, work=executor.Work(row_ids=b"\1\0\0\0\7\0\0\0"))
    recorded, replayed = (
        pb.JournaledEffect(send_step=pb.SendStep(batch=batch.SerializeToString()))
        for batch in (ours, theirs)
    )

    difference = find_difference(recorded, replayed)

    assert difference is not None
    assert difference.field == "send_step.batch.work.row_ids[1]"
    assert (difference.recorded, difference.replayed) == ("5", "7")


def test_difference_tells_lengths_when_one_column_is_the_beginning_of_the_other() -> None:
    ours = executor.Work(row_ids=b"\1\0\0\0")
    theirs = executor.Work(row_ids=b"\1\0\0\0\7\0\0\0")

    difference = find_difference(ours, theirs)

    assert difference is not None
    assert (difference.field, difference.recorded) == ("row_ids", "1 elements")


def test_batches_are_equal_when_only_the_order_of_a_map_differs() -> None:
    # Two encodings of {1: 1.0, 2: 2.0}.
    first, second = b"\x42\x07\x08\x01\x15\0\0\x80\x3f", b"\x42\x07\x08\x02\x15\0\0\0\x40"
    messages = []
    for params in (first + second, second + first):
        rows = executor.NewRows(sampling_params=[executor.SamplingParams.FromString(params)])
        messages.append(executor.ScheduleBatch(new_rows=rows))
    assert dict(messages[0].new_rows.sampling_params[0].logit_bias) == {1: 1.0, 2: 2.0}

    assert find_difference(messages[0], messages[1]) is None
