"""The servicer, and the worker behind it whose steps may still run on the device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import grpc.aio
import numpy as np
import pytest

from executor_service.model import LoadedModel
from executor_service.runner import CacheConfig, build_runner
from executor_service.service import (
    Encode,
    ExecutorServicer,
    ReadyExecutor,
    StepWorker,
    decode_batch,
)
from executor_service.steps import (
    Batch,
    ExecutorLimits,
    RowStatus,
    RunningStep,
    RunWatch,
    StepAnswer,
    StepExecutor,
    StepStatus,
)
from splitserve.executor.v1 import executor_pb2 as pb
from splitserve.executor.v1 import executor_pb2_grpc
from splitserve_rpc import bind_server, failure_of
from tests.support.devices.late_device import LateStreams, late_runner
from tests.support.fakes.fake_runner import FakeRunner
from tests.support.models.tiny_models import VOCAB_SIZE
from tests.support.processes.patience import PATIENCE_S
from tests.support.steps.batches import NewRow, Sender, WorkRow, tokens_of
from tests.support.steps.step_driver import make_executor_info

INFO = make_executor_info()
MIB = 1024 * 1024


@pytest.fixture
async def servicer_and_stub() -> AsyncIterator[
    tuple[ExecutorServicer, executor_pb2_grpc.ExecutorServiceStub]
]:
    running = bind_server("127.0.0.1:0", ())
    servicer = ExecutorServicer()
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, running.server)
    await running.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield servicer, executor_pb2_grpc.ExecutorServiceStub(channel)
    await servicer.drain()
    await running.server.stop(None)


Pair = tuple[ExecutorServicer, executor_pb2_grpc.ExecutorServiceStub]


def _fake_worker(executor: type[StepExecutor] = StepExecutor) -> StepWorker:
    return StepWorker(executor(INFO, FakeRunner(block_size=4, num_device_blocks=16)))


async def test_tokenizer_comes_in_chunks_of_a_mebibyte_when_it_is_large(
    servicer_and_stub: Pair, tmp_path: Path
) -> None:
    servicer, stub = servicer_and_stub
    (tmp_path / "tokenizer.json").write_bytes(b"x" * MIB + b"yz")
    (tmp_path / "rag.jinja").write_bytes(b"")
    name = "additional_chat_templates/rag.jinja"
    paths = {"tokenizer.json": tmp_path / "tokenizer.json", name: tmp_path / "rag.jinja"}
    servicer.serve(ReadyExecutor(_fake_worker(), lambda: INFO, paths))
    chunks = [chunk async for chunk in stub.GetTokenizer(pb.GetTokenizerRequest())]
    assert [(chunk.file_name, len(chunk.data), chunk.data[-2:]) for chunk in chunks] == [
        ("tokenizer.json", MIB, b"xx"),
        ("tokenizer.json", 2, b"yz"),
        (name, 0, b""),
    ]


async def test_rpcs_are_refused_when_the_model_is_not_loaded_yet(servicer_and_stub: Pair) -> None:
    _, stub = servicer_and_stub
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetInfo(pb.GetInfoRequest())
    assert failure_of(caught.value).reason == "MODEL_NOT_READY"


async def test_info_says_whether_the_executor_is_drained(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    said = []
    for is_drained in (False, True):
        servicer.serve(ReadyExecutor(_fake_worker(), lambda: INFO, is_drained=lambda: is_drained))  # noqa: B023
        said.append((await stub.GetInfo(pb.GetInfoRequest())).drained)
    assert said == [False, True]


async def test_nobody_watches_when_the_only_stream_was_closed(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    servicer.serve(ReadyExecutor(_fake_worker(), lambda: INFO))
    call = stub.Execute()
    await call.write(pb.ScheduleBatch(scheduler_epoch=1, executor_epoch=1, step_id=1))
    await call.read()
    nobody_watches = asyncio.create_task(servicer.streams.wait_none_open())
    await asyncio.sleep(0)
    assert not nobody_watches.done()
    call.cancel()
    await nobody_watches


class _Broken(StepExecutor):
    def begin(
        self,
        batch: Batch,
        then: Callable[[StepAnswer], None],
        queue_us: int = 0,
        watch: RunWatch | None = None,
    ) -> RunningStep | None:
        raise RuntimeError("a bug of ours")


async def test_batch_gets_a_result_when_we_have_a_bug(servicer_and_stub: Pair) -> None:
    servicer, stub = servicer_and_stub
    servicer.serve(ReadyExecutor(_fake_worker(_Broken), lambda: INFO))
    call = stub.Execute()
    for step_id in (1, 2):
        await call.write(pb.ScheduleBatch(scheduler_epoch=1, executor_epoch=1, step_id=step_id))
    results = [await call.read(), await call.read()]
    call.cancel()
    assert [(r.step_id, r.status, r.error.reason) for r in results] == [
        (step_id, pb.STEP_STATUS_FAILED, pb.STEP_ERROR_REASON_INTERNAL) for step_id in (1, 2)
    ]


SENDER = Sender(1, 1)
PROMPT = [5, 6, 7]
CACHE = CacheConfig(4, num_device_blocks=8, num_host_blocks=2)
LATE_INFO = make_executor_info(
    vocab_size=VOCAB_SIZE,
    num_device_blocks=8,
    num_host_blocks=2,
    limits=ExecutorLimits(max_num_rows=4, max_inflight_steps=3),
)
SNAPSHOT = SENDER.batch(1, new=[NewRow(0, (0, 1), num_prompt=3)], work=[WorkRow(0, 0, PROMPT)])


def _decode(step_id: int) -> pb.ScheduleBatch:
    """The token after what the step before sampled."""
    work = [WorkRow(0, len(PROMPT) + step_id - 2, back=1)]
    return SENDER.batch(step_id, base=step_id - 1, work=work)


# -- the executor ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Late:
    """An executor whose device does nothing by itself, and its answers."""

    streams: LateStreams
    executor: StepExecutor
    answers: list[StepAnswer] = field(default_factory=list)

    def begin(self, batch: pb.ScheduleBatch) -> RunningStep | None:
        return self.executor.begin(decode_batch(batch), self.answers.append)

    @property
    def answered(self) -> list[int]:
        return [answer.step_id for answer in self.answers]


@pytest.fixture
def late(loaded: LoadedModel) -> _Late:
    streams = LateStreams()
    return _Late(streams, StepExecutor(LATE_INFO, late_runner(loaded, CACHE, streams)))


def _truth(loaded: LoadedModel, *batches: pb.ScheduleBatch) -> list[StepAnswer]:
    """What is said where no device is late."""
    executor = StepExecutor(LATE_INFO, build_runner(loaded, CACHE))
    return [executor.execute(decode_batch(batch)) for batch in batches]


def _tokens(answers: list[StepAnswer]) -> list[list[int] | None]:
    return [a.output.sampled_token_ids.tolist() if a.output is not None else None for a in answers]


def test_steps_begin_when_those_before_are_not_done(loaded: LoadedModel, late: _Late) -> None:
    batches = [SNAPSHOT, _decode(2), _decode(3)]
    running = [late.begin(batch) for batch in batches]
    assert (late.answers, late.streams.num_waits) == ([], 0)
    late.executor.finish(running[0])
    assert late.answered == [1]
    late.executor.finish()
    assert _tokens(late.answers) == _tokens(_truth(loaded, *batches))


def test_no_more_steps_begin_than_may_be_in_flight(late: _Late) -> None:
    for batch in (SNAPSHOT, _decode(2), _decode(3), _decode(4)):
        late.begin(batch)
    assert late.answered == [1, 2, 3]


_NEED_HISTORY = {
    "repetition_penalty",
    "frequency_penalty",
    "num_prompt_logprobs",
    "bad_words_token_ids",
}


def _with_params(**params: object) -> pb.ScheduleBatch:
    history = PROMPT if _NEED_HISTORY & set(params) else []
    row = NewRow(0, (0, 1), num_prompt=3, params=params, history=history)
    return SENDER.batch(1, new=[row], work=[WorkRow(0, 0, PROMPT)])


@pytest.mark.parametrize(
    ("params", "answered"),
    [
        # What may follow is found on the host.
        ({"bad_words_token_ids": [pb.TokenSequence(token_ids=[3, 4])]}, [1, 2]),
        ({"repetition_penalty": 1.5}, []),
        ({"temperature": 1.0, "frequency_penalty": 3.0}, []),
        ({"temperature": 1.0, "top_p": 0.5, "top_k": 9, "min_p": 0.1}, []),
        ({"num_prompt_logprobs": 1}, []),
        ({"min_tokens": 2, "suppressed_token_ids": [3], "num_logprobs": 1}, []),
    ],
)
def test_steps_before_are_finished_first_when_the_host_needs_to_know(
    loaded: LoadedModel, late: _Late, params: dict[str, object], answered: list[int]
) -> None:
    batches = [_with_params(**params), _decode(2), _decode(3)]
    for batch in batches:
        late.begin(batch)
    assert late.answered == answered
    late.executor.finish()
    assert _tokens(late.answers) == _tokens(_truth(loaded, *batches))


@pytest.mark.parametrize(
    ("batch", "status"),
    [
        (SENDER.batch(3, base=1), StepStatus.NEED_SNAPSHOT),
        (SENDER.batch(3, base=2, removed=[3]), StepStatus.REFUSED),
        (_decode(2), StepStatus.OK),
        (SNAPSHOT, StepStatus.OK),
        (Sender(1, 2).batch(3), StepStatus.REFUSED),
        (Sender(2, 1).batch(1), StepStatus.OK),
    ],
    ids=["need snapshot", "refused", "repeat", "older repeat", "wrong epoch", "newer scheduler"],
)
def test_answers_keep_their_order_when_one_needs_no_computing(
    loaded: LoadedModel, late: _Late, batch: pb.ScheduleBatch, status: StepStatus
) -> None:
    for earlier in (SNAPSHOT, _decode(2)):
        late.begin(earlier)
    assert late.begin(batch) is None
    assert late.answered == [1, 2, batch.step_id]
    assert late.answers[2].status is status
    assert _tokens(late.answers) == _tokens(_truth(loaded, SNAPSHOT, _decode(2), batch))


def test_row_knows_nothing_of_a_removed_row_in_flight(late: _Late) -> None:
    late.begin(SNAPSHOT)
    params = {"repetition_penalty": 50.0}
    new = NewRow(0, (2, 3), num_prompt=1, params=params, history=[9])
    late.begin(SENDER.batch(2, base=1, removed=[0], new=[new]))
    late.begin(SENDER.batch(3, base=2, work=[WorkRow(0, 0, back=2)]))
    late.executor.finish()
    output = late.answers[2].output
    assert output is not None
    assert output.row_statuses.tolist() == [RowStatus.INPUT_UNAVAILABLE]
    assert late.executor._rows.histories(np.array([0])) == [[9]]


def test_step_is_not_done_when_only_its_swap_is_not(late: _Late) -> None:
    batch = SENDER.batch(1, swap_out=[(0, 1)], work=[])
    batch.MergeFrom(SNAPSHOT)
    running = late.begin(batch)
    assert running is not None
    late.streams.advance()
    assert not running.pending.is_done
    late.streams.advance(swap=True)
    assert running.pending.is_done


# -- the threads -------------------------------------------------------------------------------


@dataclass(slots=True)
class _HeldWorker:
    """A worker whose device waits for the test."""

    streams: LateStreams
    worker: StepWorker
    results: SimpleQueue[pb.StepResult] = field(default_factory=SimpleQueue)

    def submit(self, *batches: pb.ScheduleBatch) -> None:
        for batch in batches:
            self.worker.submit(batch, self._deliver)

    def _deliver(self, encode: Encode) -> None:
        self.results.put(encode())


@pytest.fixture
def worker(loaded: LoadedModel) -> Iterator[_HeldWorker]:
    streams = LateStreams(is_held=True)
    worker = StepWorker(StepExecutor(LATE_INFO, late_runner(loaded, CACHE, streams)))
    yield _HeldWorker(streams, worker)
    streams.release()
    worker.finish()


def test_worker_begins_a_step_before_the_last_is_done(worker: _HeldWorker) -> None:
    worker.submit(SNAPSHOT, _decode(2))
    worker.streams.wait_for_steps(2)
    assert worker.results.empty()
    worker.streams.finish_step()
    assert worker.results.get(timeout=PATIENCE_S).step_id == 1
    assert worker.results.empty()
    worker.submit(_decode(3))
    worker.streams.wait_for_steps(2)
    for step_id in (2, 3):
        worker.streams.finish_step()
        assert worker.results.get(timeout=PATIENCE_S).step_id == step_id


def test_worker_answers_all_when_it_is_told_to_finish(
    loaded: LoadedModel, worker: _HeldWorker
) -> None:
    batches = (SNAPSHOT, _decode(2), SENDER.batch(3, base=1), _decode(3))
    worker.submit(*batches)
    worker.streams.wait_for_steps(2)
    worker.streams.release()
    worker.worker.finish()
    results = [worker.results.get_nowait() for _ in batches]
    assert [result.step_id for result in results] == [1, 2, 3, 3]
    assert results[2].status == pb.STEP_STATUS_NEED_SNAPSHOT
    tokens = [tokens_of(results[number]) for number in (0, 1, 3)]
    assert tokens == _tokens(_truth(loaded, SNAPSHOT, _decode(2), _decode(3)))


def test_worker_answers_the_others_when_one_cannot_be_told(worker: _HeldWorker) -> None:
    def deliver(_encode: Encode) -> None:
        raise RuntimeError("the event loop is closed")

    worker.worker.submit(SNAPSHOT, deliver)
    worker.submit(_decode(2))
    worker.streams.wait_for_steps(2)
    worker.streams.release()
    assert worker.results.get(timeout=PATIENCE_S).status == pb.STEP_STATUS_OK


def test_worker_has_no_second_thread_when_no_step_is_late(loaded: LoadedModel) -> None:
    worker = StepWorker(StepExecutor(LATE_INFO, build_runner(loaded, CACHE)))
    worker.submit(SNAPSHOT, lambda _encode: None)
    worker.finish()
    assert worker._waiter is None
