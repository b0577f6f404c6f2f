"""Execution of one step: block moves, forward pass, sampling or vectors. A faulty row fails alone.

On a GPU a step finishes some time after it has begun, and the next step may begin meanwhile: the
device works in order, and input tokens may exist on the device only. On a CPU a step is finished
when `begin` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor_service.device import (
    BlockTransfers,
    DeviceStreams,
    KVCache,
    SampledTokens,
    Timer,
    Uploads,
    is_out_of_memory,
    release_cached_memory,
    streams_of,
)
from executor_service.errors import OutOfMemory, StepFailed
from executor_service.model import LoadedAdapters, LoadedModel, PagedModel
from executor_service.runner.decode_runs import DecodeRuns, PendingRun
from executor_service.runner.forward_pass import (
    ForwardPass,
    ForwardResult,
    PassBatches,
    run_in_parts,
    scores_too_much,
)
from executor_service.runner.pending_sampling import PendingSampling
from executor_service.runner.vectors import PendingVectors
from executor_service.sampling import Adjust, Draw, TokenCounts, adjust_in_torch, draw_in_torch
from executor_service.steps import (
    FinishedStep,
    Int32Array,
    PendingStep,
    StepInput,
    StepOutput,
    execute_step,
    run_on,
)

_NO_ROWS = StepOutput(np.empty(0, np.uint8), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class _Computing:
    """Work of a step with rows on the compute stream. `sample_timer` stops at its end."""

    forward_timer: Timer
    sample_timer: Timer
    sampling: PendingSampling | PendingRun | PendingVectors


class ModelRunner:
    """Runs steps of one `model` on its KV pools, `cache`. Not thread-safe."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        model: PagedModel,
        draw: Draw = draw_in_torch,
        streams: DeviceStreams | None = None,
        adjust: Adjust = adjust_in_torch,
    ) -> None:
        """Prepares a runner for `model`, which computes `loaded` on the pools of `cache`.

        `adjust` changes logits, then `draw` chooses tokens. `streams`: None for those of the
        cache's device.
        """
        self.cache = cache
        self.model = model
        self._streams = streams or streams_of(cache.device)
        self._uploads = uploads = Uploads(cache.device, self._streams)
        # Without shared memory, the host waits for the device after each turn of a run.
        self._has_own_memory = not uploads.shares_memory
        self._counts = TokenCounts(loaded.vocab_size, cache.device, uploads)
        self._sampled = SampledTokens()
        # Adapters that rows may name.
        self.adapters = LoadedAdapters()
        batches = PassBatches(loaded, cache, uploads, self._sampled, self.adapters)
        self._forward_pass = ForwardPass(loaded, cache, model, batches)
        self._runs = DecodeRuns(loaded, model, batches)
        self._vector_parts = loaded.vector_parts
        self._draw = draw
        self._adjust = adjust
        self._transfers = BlockTransfers(cache, self._streams)
        self._unfinished: deque[PendingModelStep] = deque()
        self._ran_out_of_memory = False

    @property
    def runs_on_alone(self) -> bool:
        """Whether rows get several tokens in a step without the host between them."""
        return self._runs.is_possible

    def execute(self, step: StepInput) -> StepOutput:
        """Begins and finishes `step`. All earlier steps must be finished. Raises StepFailed."""
        return execute_step(self, step)

    def begin(self, step: StepInput) -> PendingStep | None:
        """Begins `step`; returns None if earlier steps must finish first.

        Raises StepFailed, whose `__cause__` is an OutOfMemory if memory ran out.
        """
        step = self._shortened(step)
        is_cut = scores_too_much(step)
        goes_by_turns = (
            step.num_run_on_tokens is not None
            and (is_cut or step.drafts is not None or bool(step.num_run_on_tokens.any()))
            and not self._runs.serves_all(step)
        )
        if self._unfinished and (goes_by_turns or is_cut):
            return None
        if goes_by_turns:
            return FinishedStep(run_on(step, self.execute, self._execute_run))
        if is_cut:
            return FinishedStep(run_in_parts(step, lambda part: self._begin(part).finish()))
        return self._begin(step)

    def _shortened(self, step: StepInput) -> StepInput:
        """Returns `step` without runs if the host would wait for the device after each turn."""
        runs = self._runs
        if step.num_run_on_tokens is None or not self._has_own_memory:
            return step
        if runs.is_possible and runs.has_plain_rows(step):
            return step
        return replace(step, num_run_on_tokens=np.zeros_like(step.num_run_on_tokens))

    def _execute_run(self, step: StepInput) -> StepOutput | None:
        """Returns the output of `step` with its runs in one go; None if it cannot run so."""
        return self._begin(step).finish() if self._runs.serves(step) else None

    def _release_memory(self) -> None:
        if self._ran_out_of_memory:
            # Not earlier: the error still held the tensors of the failed step.
            self._ran_out_of_memory = False
            release_cached_memory(self.cache.device)

    @torch.inference_mode()
    def _begin(self, step: StepInput) -> PendingModelStep:
        self._release_memory()
        if not (self._unfinished or step.sampling_params.adjusts_logits.any()):
            # Frees the counts, also those of rows that are gone.
            self._counts.forget()
        try:
            with self._failing_the_step(), self._streams.on_device():
                pending = self._ask(step)
        except StepFailed:
            # How many tokens of the step were counted is unknown.
            self._counts.forget()
            raise
        self._unfinished.append(pending)
        return pending

    def _ask(self, step: StepInput) -> PendingModelStep:
        move_timers = self._transfers.begin(step)
        computing = self._compute(step) if step.num_rows else None
        num_more = step.num_run_on_tokens
        pending = PendingModelStep(self, step.step_id, move_timers, computing, num_more)
        if computing is not None and (self._unfinished or not pending.is_done):
            sampling = computing.sampling
            self._sampled.keep(step, sampling.rows, sampling.token_ids)
        return pending

    def finish(self, pending: PendingModelStep) -> StepOutput:
        """Returns the output of `pending`, the oldest unfinished step. Raises StepFailed."""
        oldest = self._unfinished.popleft()
        assert pending is oldest, "steps are finished in the order in which they began"
        self._sampled.forget(pending.step_id)
        with self._failing_the_step():
            move_us = self._transfers.finish(pending.move_timers)
            computing = pending.computing
            if computing is None:
                return replace(_NO_ROWS, move_us=move_us)
            # Reading a timer waits for the device.
            forward_us = computing.forward_timer.elapsed_us()
            sample_us = computing.sample_timer.elapsed_us()
            return computing.sampling.output(move_us, forward_us, sample_us)

    def _compute(self, step: StepInput) -> _Computing:
        if self._runs.serves(step):
            return self._run_on(step)
        forward_timer = self._streams.start_timer()
        forward = self._forward_pass.run(step)
        forward_timer.stop()
        sample_timer = self._streams.start_timer()
        sampling = self._sampled_by(step, forward)
        sample_timer.stop()
        return _Computing(forward_timer, sample_timer, sampling)

    def _sampled_by(
        self, step: StepInput, forward: ForwardResult
    ) -> PendingSampling | PendingVectors:
        if self._vector_parts is not None:
            return PendingVectors(step, forward, self._vector_parts.head, self._streams)
        return PendingSampling(
            step, forward, self._draw, self._counts, self._streams, self._adjust, self._uploads
        )

    def _run_on(self, step: StepInput) -> _Computing:
        forward_timer = self._streams.start_timer()
        tokens, rows = self._runs.run(step)
        forward_timer.stop()
        sample_timer = self._streams.start_timer()
        run = PendingRun(tokens, rows, self._streams.copy_to_host)
        sample_timer.stop()
        return _Computing(forward_timer, sample_timer, run)

    @contextmanager
    def _failing_the_step(self) -> Iterator[None]:
        """Converts exceptions raised inside to StepFailed."""
        try:
            yield
        except StepFailed:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                self._ran_out_of_memory = True
                raise StepFailed("out of memory") from OutOfMemory(str(error))
            raise StepFailed(f"{type(error).__name__} while the step ran") from error


@dataclass(frozen=True, slots=True, eq=False)
class PendingModelStep:
    """A step that has begun on the device. `computing`: None for a step without rows."""

    runner: ModelRunner
    step_id: int
    move_timers: list[Timer]
    computing: _Computing | None
    num_more_tokens: Int32Array | None

    @property
    def is_done(self) -> bool:
        try:
            return all(timer.is_over for timer in self._timers)
        except RuntimeError:  # the device is lost; `finish` will say so
            return True

    def wait(self) -> None:
        with suppress(RuntimeError):
            for timer in self._timers:
                timer.wait()

    def finish(self) -> StepOutput:
        return self.runner.finish(self)

    @property
    def _timers(self) -> list[Timer]:
        computing = self.computing
        return self.move_timers + ([] if computing is None else [computing.sample_timer])
