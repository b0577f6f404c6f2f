"""Cost of bringing a preempted request back: swapping over the host link, or recomputing."""

from __future__ import annotations

from scheduler_service.scheduler.engine.step_time_model import StepTimeModel
from scheduler_service.scheduler.values import PreemptionMode, SchedulerConfig

# Assumed until block moves were measured: half of what PCIe 4.0 x16 reaches.
ASSUMED_HOST_LINK_BYTES_PER_S = 12e9
_NEWEST_WEIGHT = 0.2
_MIN_PREFILL_TOKENS = 16


class PreemptionCosts:
    """Running average of the time of block moves, and the choice between swap and recompute.

    `prefill_us`: duration of the latest step that computed prompts, in us; 0 before the first.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimeModel) -> None:
        self._mode = config.preemption_mode
        self._us_per_block = config.block_bytes / ASSUMED_HOST_LINK_BYTES_PER_S * 1e6
        self._times = times
        self.prefill_us = 0.0

    def observe(
        self, *, num_moves: int, move_us: int, num_rows: int, num_tokens: int, compute_us: int
    ) -> None:
        """Learns from an executed step; `move_us` and `compute_us` are 0 if not measured."""
        if num_moves and move_us:
            self._us_per_block = _average(self._us_per_block, move_us / num_moves)
        if compute_us and num_tokens - num_rows >= _MIN_PREFILL_TOKENS:
            self.prefill_us = float(compute_us)

    def recompute_ns(self, num_tokens: int) -> int:
        """Returns the estimated time in ns to compute `num_tokens`; 0 before any measurement."""
        return int(self._recompute_us(num_tokens) * 1000)

    def _recompute_us(self, num_tokens: int) -> float:
        return self._times.prompt_us(num_tokens) if self._times.has_prompts else 0.0

    def move_ns(self, num_blocks: int) -> int:
        """Returns the time in ns to move `num_blocks` over the host link; assumed at first."""
        return int(num_blocks * self._us_per_block * 1000)

    def prefers_swap(self, *, num_blocks: int, num_tokens: int, num_sequences: int) -> bool:
        """Returns whether moving `num_blocks` out and back costs less than a recompute.

        `num_tokens`: tokens to compute again. Before any measurement, a request of several
        sequences is swapped and a request of one sequence is recomputed, as in vLLM's first engine.
        A mode other than AUTO decides by itself.
        """
        if self._mode is not PreemptionMode.AUTO:
            return self._mode is PreemptionMode.SWAP
        recompute_us = self._recompute_us(num_tokens)
        if recompute_us == 0.0 or self._us_per_block == 0.0:
            return num_sequences > 1
        return 2 * num_blocks * self._us_per_block < recompute_us


def _average(average: float, newest: float) -> float:
    return newest if average == 0.0 else average + _NEWEST_WEIGHT * (newest - average)
