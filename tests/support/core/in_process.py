"""A scheduler core and an executor in one process, joined by real protobuf messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from executor_service.service import decode_batch, encode_answer
from executor_service.steps import (
    AudioInfo,
    EncoderInfo,
    ExecutorInfo,
    ExecutorLimits,
    ModelInfo,
    ModelVectors,
    RowGrammars,
    Runner,
    StepExecutor,
    StepInput,
)
from executor_service.steps import Feature as ExecutorFeature
from scheduler_service.scheduler.values import (
    Feature,
    PreemptionCause,
    Request,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
    StepEvents,
    StepPlan,
)
from scheduler_service.step_codec import decode_result, encode_plan
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import EngineWithQueue, make_config
from tests.support.fakes.fake_model import expected_tokens
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault

SCHEDULER_EPOCH = 7


class InProcessEngine:
    """The engine loop without gRPC: up to `depth` steps are encoded before one is executed.

    `preempt_at`: numbers of steps before which the youngest sequence is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        epoch: int,
        depth: int,
        preempt_at: frozenset[int] = frozenset(),
        grammars: RowGrammars | None = None,
    ) -> None:
        self.scheduler = EngineWithQueue(config)
        self.executor = StepExecutor(executor_info(config, epoch), runner, grammars=grammars)
        self.epoch = epoch
        self.depth = depth
        self.preempt_at = preempt_at
        self.in_flight: deque[tuple[StepPlan, bytes]] = deque()
        self.delivered: dict[str, list[list[int]]] = {}
        self.finished: list[Request] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request, *, is_new: bool = True) -> None:
        """Gives a request to the core, new or from another executor."""
        request.client_key = request.arrival
        if is_new:
            self.scheduler.add(request)
        else:
            self.scheduler.readmit(request)
        self._requests[request.client_key] = request
        if is_new:
            self.delivered[request.request_id] = [[] for _ in range(request.params.num_sequences)]
        self._deliver(self.scheduler.take_ended())

    def fill(self) -> None:
        while len(self.in_flight) < self.depth:
            if self.scheduler.last_step_id + 1 in self.preempt_at and self.scheduler.num_running:
                youngest = self.scheduler.placement.rows.running[-1].request
                self.scheduler.placement.preempt(youngest, PreemptionCause.BLOCKS)
            plan = self.scheduler.schedule()
            if self.scheduler.ask_again_at_ns is not None and not self.in_flight:
                self.scheduler.tick(self.scheduler.ask_again_at_ns)
                plan = self.scheduler.schedule()
            self._deliver(self.scheduler.take_ended())
            if plan is None:
                return
            batch = encode_plan(plan, scheduler_epoch=SCHEDULER_EPOCH, executor_epoch=self.epoch)
            self.in_flight.append((plan, batch.data))

    def answer(self, alter: Callable[[pb.StepResult], None] | None = None) -> StepEvents:
        """Executes the oldest step in flight; `alter` may spoil its result."""
        plan, message = self.in_flight.popleft()
        answer = self.executor.execute(decode_batch(pb.ScheduleBatch.FromString(message)))
        result = encode_answer(answer)
        if alter is not None:
            alter(result)
        received = pb.StepResult.FromString(result.SerializeToString())
        outcome = decode_result(received, len(plan.work.row_ids))
        return self._deliver(self.scheduler.apply(outcome))

    def skip(self, status: pb.StepStatus) -> StepEvents:
        """Answers the oldest step in flight with `status`, and does not execute it."""
        plan, _ = self.in_flight.popleft()
        result = pb.StepResult(step_id=plan.step_id, status=status)
        outcome = decode_result(result, len(plan.work.row_ids))
        return self._deliver(self.scheduler.apply(outcome))

    def run(self, max_steps: int = 100_000) -> dict[str, list[int]]:
        """Runs until nothing is left; returns the tokens of each request's first sequence."""
        for _ in range(max_steps):
            self.fill()
            if not self.in_flight:
                return {name: tokens[0] for name, tokens in self.delivered.items()}
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")

    def _deliver(self, events: StepEvents) -> StepEvents:
        """Delivers tokens to clients."""
        for key, token_id in zip(
            events.client_keys.tolist(), events.token_ids.tolist(), strict=True
        ):
            self.delivered[self._requests[key].request_id][0].append(token_id)
        for event in events.tokens:
            tokens = self.delivered[event.sequence.request.request_id]
            tokens[event.sequence.index].append(event.token_id)
        for request in events.finished:
            if request.completions:
                self.delivered[request.request_id] = [c.token_ids for c in request.completions]
        self.finished += events.finished
        return events


def executor_info(config: SchedulerConfig, epoch: int) -> ExecutorInfo:
    """Returns the registration of an executor for `config`."""
    names = {feature.name for feature in config.features}
    vectors, max_model_len = None, config.max_model_len
    if config.vectors is not None:
        labels = tuple(f"label {index}" for index in range(config.vectors.num_labels))
        sizes = config.vectors
        vectors = ModelVectors(sizes.embedding_size, labels, sizes.is_uncached)
        names.add(ExecutorFeature.POOLING.name)
        max_model_len -= 1  # the vector's place
    return ExecutorInfo(
        executor_epoch=epoch,
        model=ModelInfo(
            "m",
            "d",
            "float32",
            "float32",
            config.vocab_size,
            max_model_len,
            tuple(config.eos_token_ids),
            sliding_window=config.sliding_window,
            encoder=_audio_encoder(config),
            vectors=vectors,
        ),
        block_size=config.block_size,
        num_device_blocks=config.num_device_blocks,
        num_host_blocks=config.num_host_blocks,
        block_bytes=1,
        limits=ExecutorLimits(
            max_num_rows=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_inflight_steps=4,
            max_adapters_per_step=config.max_adapters or None,
        ),
        features=frozenset(each for each in ExecutorFeature if each.name in names),
    )


def _audio_encoder(config: SchedulerConfig) -> EncoderInfo | None:
    """An encoder of audio; None for other models."""
    num_features, num_positions = config.num_encoder_features, config.max_encoder_tokens
    if num_features is None or num_positions is None:
        return None
    audio = AudioInfo(
        num_mel_bins=1,
        num_frames=num_features,
        num_positions=num_positions,
        sampling_rate=16_000,
        hop_length=160,
        fft_length=400,
    )
    return EncoderInfo(num_positions, (), audio)


def output_token_ids(request: Request, index: int = 0) -> list[int]:
    """The output tokens of a request that is not running."""
    sequence = request.sequences[index]
    tokens: list[int] = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
    return tokens


# No token ends a sequence by chance.
VOCAB_SIZE = 997
ALL_FEATURES = frozenset(Feature)


class CheckedEngine:
    """Requests, their prompts, and the proof that each got the tokens of its own context.

    Its vocabulary has no end-of-sequence token, so a request ends by its length. `options` are
    those of `SchedulerConfig` that matter to the test.
    """

    def __init__(
        self,
        *,
        depth: int = 1,
        fault: Callable[[StepInput], StepFault] = no_fault,
        us_per_block: int = 0,
        us_per_token: int = 0,
        **options: object,
    ) -> None:
        values: dict[str, object] = {
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": frozenset(),
            "features": ALL_FEATURES,
            "max_adapters": 2,
        }
        self.config = make_config(**(values | options))
        self.runner = FakeRunner(
            block_size=self.config.block_size,
            num_device_blocks=self.config.num_device_blocks,
            num_host_blocks=self.config.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.config.eos_token_ids,
            fault=fault,
            sliding_window_tokens=self.config.sliding_window,
            us_per_block=us_per_block,
            us_per_token=us_per_token,
        )
        self.engine = InProcessEngine(self.config, self.runner, epoch=1, depth=depth)
        self.core = self.engine.scheduler
        self.requests: list[Request] = []
        self.num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        request_id: str = "",
        *,
        scheduling: SchedulingParams | None = None,
        encoder: Sequence[int] | None = None,
        resume: Sequence[Sequence[int]] = (),
        arrival: int | None = None,
        **params: object,
    ) -> Request:
        """Adds a request; its number is its arrival, its seed and, after an r, its id."""
        self.num_added += 1
        number = self.num_added
        request = Request.create(
            request_id or f"r{number}",
            prompt,
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival=number if arrival is None else arrival,
            seed=number,
            scheduling=scheduling or SchedulingParams(),
            encoder_token_ids=encoder,
            resume_token_ids=resume,
        )
        self.engine.add(request)
        self.requests.append(request)
        return request

    def adopt(self, request: Request, other: CheckedEngine) -> None:
        """Takes over a request of another engine, and the tokens its client has."""
        self.engine.delivered[request.request_id] = other.engine.delivered[request.request_id]
        self.engine.add(request, is_new=False)
        self.requests.append(request)

    def preempt(self, request: Request) -> None:
        """Preempts a running request."""
        self.core.placement.preempt(request, PreemptionCause.BLOCKS)

    def step(self, num_steps: int = 1) -> None:
        """Plans and executes that many steps, as long as there is something to do."""
        for _ in range(num_steps):
            self.engine.fill()
            if self.engine.in_flight:
                self.answer()

    def answer(self) -> StepEvents:
        """Executes the oldest step in flight. The executor must not refuse it."""
        return self.engine.answer(_assert_not_refused)

    def drain(self, max_steps: int = 2000) -> None:
        """Runs until nothing is left to do."""
        for _ in range(max_steps):
            self.engine.fill()
            if not self.engine.in_flight:
                return
            self.answer()
        raise AssertionError(f"still running after {max_steps} steps")

    def run(self, max_steps: int = 2000, *, has_faults: bool = False) -> None:
        """Runs to the end, and checks everything.

        `has_faults`: what a fault spoiled may have been read, though never believed, by steps that
        were in flight behind it.
        """
        self.drain(max_steps)
        assert has_faults or self.runner.violations == []
        self.check()

    def check(self) -> None:
        """Checks that all requests ended with the expected tokens and released their blocks."""
        for request in self.requests:
            assert request.error is None
            assert request.is_finished
            if request.params.is_streamed:
                self.check_tokens(request)
        self.check_blocks()

    def check_tokens(self, request: Request) -> None:
        """Checks the tokens of a finished request, after the tokens it resumed with."""
        for sequence, tokens in zip(
            request.sequences, self.engine.delivered[request.request_id], strict=True
        ):
            known = sequence.num_output_tokens
            expected = expected_tokens(
                sequence.token_ids[: sequence.num_prompt_tokens].tolist(),
                known,
                sequence.seed if request.params.temperature > 0 else 0,
                VOCAB_SIZE,
                adapter=request.scheduling.adapter,
                encoder=encoder_tokens(request),
                window=self.config.sliding_window,
            )
            assert tokens == expected[known - len(tokens) :], request.request_id

    def check_blocks(self) -> None:
        """Checks that all blocks of both pools are free."""
        assert self.core.num_free_blocks == self.config.num_device_blocks
        assert self.core.num_free_host_blocks == self.config.num_host_blocks
        blocks = self.core.placement.blocks
        for pool in (blocks.device, blocks.host):
            assert not any(pool.reference_count(block) for block in range(pool.num_blocks))


def _assert_not_refused(result: pb.StepResult) -> None:
    # The core would compute everything again, and nobody would notice but by the clock.
    assert result.status != pb.STEP_STATUS_REFUSED, result.error


def encoder_tokens(request: Request) -> list[int]:
    """The encoder tokens of a request."""
    if request.encoder_token_ids is None:
        return []
    tokens: list[int] = request.encoder_token_ids.tolist()
    return tokens
