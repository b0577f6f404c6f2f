"""The client of a request over a FakeRunner: what it gets must be true, and in the end complete."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from scheduler_service.scheduler.engine.outcomes.losses import MAX_FRUITLESS_LOSSES
from scheduler_service.scheduler.values.config import SchedulerConfig
from scheduler_service.scheduler.values.request import FinishReason, Request, ScoredToken
from tests.support.core.engine import Delivery
from tests.support.core.truth import Spec, Truth
from tests.support.fakes.fake_logprobs import fake_logprob


@dataclass(slots=True)
class Client:
    """`is_aborted`, `has_bad_row`, `saw_broken_core`: what was done to its request."""

    spec: Spec
    truth: Truth
    delivery: Delivery
    is_aborted: bool = False
    has_bad_row: bool = False
    saw_broken_core: bool = False

    @property
    def request(self) -> Request:
        """The request itself."""
        return self.delivery.request

    def check(self, config: SchedulerConfig) -> None:
        """What it has got so far is true; all of it is there if the request has ended well."""
        delivery, params = self.delivery, self.spec.params
        if params.is_streamed:
            each = zip(self._expected_tokens(), delivery.tokens, delivery.scored, strict=True)
            for expected, tokens, scored in each:
                assert tokens == expected[: len(tokens)]
                if params.num_logprobs is not None:
                    self._check_scores(tokens, scored, params.num_logprobs)
        else:
            assert not any(delivery.tokens)
        num_scored = len(delivery.prompt_logprobs)
        if num_scored:
            assert params.num_prompt_logprobs is not None
            known = self.spec.prompt[1 : num_scored + 1]
            logprobs = self.truth.prompt_logprobs[:num_scored]
            num_top = params.num_prompt_logprobs
            self._check_scores(known, delivery.prompt_logprobs, num_top, logprobs)
            positions = [scored.position for scored in delivery.prompt_logprobs]
            assert positions == list(range(1, num_scored + 1))
        assert delivery.is_finished == self.request.is_finished
        if delivery.is_finished:
            self._check_end(config)

    def _expected_tokens(self) -> list[list[int]]:
        return [output[self.spec.num_resumed :] for output in self.truth.outputs]

    def _check_scores(
        self,
        token_ids: Items[int],
        scored: Items[ScoredToken],
        num_top: int,
        logprobs: Items[float] | None = None,
    ) -> None:
        if logprobs is None:
            logprobs = [fake_logprob(token_id) for token_id in token_ids]
        assert [score.token_id for score in scored] == list(token_ids)
        assert [score.logprob for score in scored] == logprobs
        assert all(len(score.top) == num_top for score in scored)

    def _check_end(self, config: SchedulerConfig) -> None:
        match self.request.finish_reason:
            case FinishReason.ABORTED:
                assert self.is_aborted
            case FinishReason.ERROR:
                self._check_error(config)
            case _:
                self._check_result()

    def _check_error(self, config: SchedulerConfig) -> None:
        assert self.request.error is not None
        match self.request.error[0]:
            case "INVALID_LOGITS" | "ROW_FAILED":
                assert self.has_bad_row
            case "INVARIANT_BROKEN":
                assert self.saw_broken_core
            case "EXECUTOR_LOST_REPEATEDLY":
                assert self.delivery.num_faults >= MAX_FRUITLESS_LOSSES
            case "DEADLINE_UNREACHABLE":
                assert config.queue_policy == "deadline"
                assert self.spec.scheduling.deadline_ns is not None
            case _:
                raise AssertionError(f"{self.request.error}")

    def _check_result(self) -> None:
        request, delivery, truth = self.request, self.delivery, self.truth
        assert request.finish_reason is truth.reasons[0]
        if self.spec.params.is_streamed:
            assert delivery.tokens == self._expected_tokens()
            assert [s.finish_reason for s in request.sequences] == truth.reasons
            indexes = list(range(len(truth.outputs))) if len(truth.outputs) > 1 else []
            assert sorted(delivery.finished_sequences) == indexes
        else:
            assert [c.token_ids for c in request.completions] == truth.outputs
            assert [c.finish_reason for c in request.completions] == truth.reasons
            self._check_completions()
        if self.spec.params.num_prompt_logprobs is not None and not self.spec.num_resumed:
            assert len(delivery.prompt_logprobs) == len(self.spec.prompt) - 1

    def _check_completions(self) -> None:
        for completion in self.request.completions:
            logprobs = map(fake_logprob, completion.token_ids)
            assert completion.cumulative_logprob == sum(logprobs)
            if self.spec.params.num_logprobs is not None:
                num_top = self.spec.params.num_logprobs
                self._check_scores(completion.token_ids, completion.scored, num_top)
        if self.spec.params.beam is not None:
            assert [c.score for c in self.request.completions] == self.truth.scores
