"""Cost of bringing a preempted request back: swapping over the host link, or recomputing."""

from __future__ import annotations

from scheduler_service.scheduler.values import PreemptionMode, SchedulerConfig

# Assumed until block moves were measured: half of what PCIe 4.0 x16 reaches.
ASSUMED_HOST_LINK_BYTES_PER_S = 12e9
_NEWEST_WEIGHT = 0.2
_MIN_PREFILL_TOKENS = 16


class PreemptionCosts:
    """Running averages of the executor's timings, and the choice between swap and recompute.

    `prefill_us`: duration of the latest step that computed prompts, in us; 0 before the first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._mode = config.preemption_mode
        self._us_per_block = config.block_bytes / ASSUMED_HOST_LINK_BYTES_PER_S * 1e6
        self._us_per_token = 0.0
        self.prefill_us = 0.0

    def observe(
        self, *, num_moves: int, move_us: int, num_rows: int, num_tokens: int, compute_us: int
    ) -> None:
        """Learns from an executed step; `move_us` and `compute_us` are 0 if not measured."""
        if num_moves and move_us:
            self._us_per_block = _average(self._us_per_block, move_us / num_moves)
        if compute_us and num_tokens - num_rows >= _MIN_PREFILL_TOKENS:
            self.prefill_us = float(compute_us)
            self._us_per_token = _average(self._us_per_token, compute_us / num_tokens)

    def recompute_ns(self, num_tokens: int) -> int:
        """Returns the estimated time in ns to compute `num_tokens`; 0 before any measurement."""
        return int(num_tokens * self._us_per_token * 1000)

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
        if self._us_per_token == 0.0 or self._us_per_block == 0.0:
            return num_sequences > 1
        return 2 * num_blocks * self._us_per_block < num_tokens * self._us_per_token


def _average(average: float, newest: float) -> float:
    return newest if average == 0.0 else average + _NEWEST_WEIGHT * (newest - average)
