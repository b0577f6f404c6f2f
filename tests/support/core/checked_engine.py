"""A scheduler core over a FakeRunner: whatever happens, the tokens must be the expected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from executor_service.steps.step import StepInput
from scheduler_service.scheduler.values.beam_search import BeamSearch, Hypothesis
from scheduler_service.scheduler.values.config import Feature
from scheduler_service.scheduler.values.plan import PreemptionCause, StepEvents
from scheduler_service.scheduler.values.request import Request, SchedulingParams
from scheduler_service.scheduler.values.sampling_params import SamplingParams
from splitserve.executor.v1 import executor_pb2 as pb
from tests.support.core.driver import make_config
from tests.support.core.in_process import InProcessEngine
from tests.support.fakes.fake_chain import expected_tokens
from tests.support.fakes.fake_logprobs import fake_logprob
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault

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
        """Takes over a request that was running on another engine, and what its client has."""
        self.engine.delivered[request.request_id] = other.engine.delivered[request.request_id]
        self.engine.add(request, is_new=False)
        self.requests.append(request)

    def preempt(self, request: Request) -> None:
        """A running request has to yield, for no reason that the core has itself."""
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
        """All have ended without an error, got the expected tokens, and left no block behind."""
        for request in self.requests:
            assert request.error is None
            assert request.is_finished
            if request.params.is_streamed:
                self.check_tokens(request)
        self.check_blocks()

    def check_tokens(self, request: Request) -> None:
        """A finished request got what it should have got, after the tokens it resumed with."""
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
        """Nobody holds a block of either pool."""
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


def expected_hypotheses(request: Request, vocab_size: int = VOCAB_SIZE) -> list[Hypothesis]:
    """What a beam search finds over the pure function that a FakeRunner computes."""
    beam = request.params.beam
    max_tokens = request.params.max_tokens
    assert beam is not None
    assert max_tokens is not None
    search = BeamSearch(beam, n=request.params.n, max_tokens=max_tokens)
    prompt = request.sequence.token_ids[: request.sequence.num_prompt_tokens].tolist()
    outputs: list[list[int]] = [[]]
    while not search.is_finished:
        candidates = []
        for output in outputs:
            token = expected_tokens(prompt + output, 1, 0, vocab_size)[0]
            top = [(token + i) % vocab_size for i in range(search.num_candidates)]
            candidates.append([(token, fake_logprob(token)) for token in top])
        selection = search.advance(candidates)
        outputs = [[*outputs[parent], token] for parent, token in selection.beams]
    return search.hypotheses
