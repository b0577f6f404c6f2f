"""Configurations of connected and expected executors, by which requests are accepted or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_service.scheduler.engine.planning import check_request, fits
from scheduler_service.scheduler.executor_state import ExecutorState
from scheduler_service.scheduler.values import Request, SchedulerConfig


@dataclass(frozen=True, slots=True)
class _Expected:
    """Configuration of an executor that left and is expected back until `until_ns`."""

    config: SchedulerConfig
    until_ns: int


class Capabilities:
    """Configurations of executors, by which requests are accepted or refused.

    An executor that left is expected back for `return_ns`. `last_config`: configuration of the
    executor that served last. It stands for executors to come while no executor is connected or
    expected; None before the first executor served.
    """

    def __init__(self, executors: Mapping[str, ExecutorState], return_ns: int) -> None:
        self._executors = executors
        self._return_ns = return_ns
        self._expected: list[_Expected] = []
        self.last_config: SchedulerConfig | None = None

    @property
    def largest_config(self) -> SchedulerConfig | None:
        """Configuration of the connected executor with the longest `max_len`, or `last_config`."""
        return max(self._connected, key=lambda config: config.max_len, default=self.last_config)

    @property
    def max_num_seqs(self) -> int:
        """Largest `max_num_seqs` of connected executors, else that of `last_config`; else 0."""
        last = 0 if self.last_config is None else self.last_config.max_num_seqs
        return max((config.max_num_seqs for config in self._connected), default=last)

    @property
    def _connected(self) -> list[SchedulerConfig]:
        return [
            executor.config
            for executor in self._executors.values()
            if executor.is_connected and not executor.is_draining
        ]

    def check_fits(self, request: Request) -> None:
        """Raises DomainError if no executor, present or expected back, can run `request`."""
        executors = self._executors.values()
        here = [each.config for each in executors if each.takes_requests]
        others = [each.config for each in executors if not each.takes_requests]
        configs = [*here, *others, *(each.config for each in self._expected)]
        fitting = next((config for config in configs if fits(request, config)), None)
        for config in [fitting] if fitting is not None else here:
            check_request(request, config)
        if fitting is None and (largest := self.largest_config) is not None:
            check_request(request, largest)

    # -- arrivals and departures of executors --------------------------------------------------

    def serves(self, config: SchedulerConfig) -> None:
        """Notes that an executor with `config` serves."""
        self.last_config = config
        self._expected = [each for each in self._expected if each.config != config]

    def left(self, config: SchedulerConfig, now_ns: int) -> None:
        """Notes that an executor with `config` left; expects it until `now_ns + return_ns`."""
        if self.last_config is not None:
            kept = [each for each in self._expected if each.config != config]
            self._expected = [*kept, _Expected(config, now_ns + self._return_ns)]

    def give_up(self, now_ns: int) -> bool:
        """Drops expected executors that are overdue at `now_ns`; returns whether there were any."""
        expected = [each for each in self._expected if each.until_ns > now_ns]
        was_longer = len(expected) < len(self._expected)
        self._expected = expected
        return was_longer

    @property
    def next_give_up_ns(self) -> int | None:
        """Time in ns at which `give_up` drops the next executor; None if none is expected."""
        return min((each.until_ns for each in self._expected), default=None)
