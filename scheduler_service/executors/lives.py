"""What is remembered of executors that may come back in the same life."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from scheduler_service.executors.step_patience import MeasuredStep, StepPatience

_MAX_REMEMBERED = 4096


@dataclass(slots=True)
class Life:
    """One life of an executor: its latest step, and what its steps took."""

    executor_epoch: int
    patience: StepPatience
    last_step_id: int = 0


class Lives:
    """The latest life at each address; of the addresses that were kept last, so many."""

    def __init__(self, step_patience_s: float, step_timeout_s: float) -> None:
        self._patience_s = (step_patience_s, step_timeout_s)
        self._lives: OrderedDict[str, Life] = OrderedDict()

    def of(self, address: str, executor_epoch: int, measured: MeasuredStep | None = None) -> Life:
        """That life, or a new one, which has `measured` a step, and is to be kept if it is true."""
        life = self._lives.get(address)
        if life is not None and life.executor_epoch == executor_epoch:
            return life
        return Life(executor_epoch, StepPatience(*self._patience_s, measured))

    def keep(self, address: str, life: Life) -> None:
        """It is the latest at `address`."""
        self._lives[address] = life
        self._lives.move_to_end(address)
        while len(self._lives) > _MAX_REMEMBERED:
            self._lives.popitem(last=False)
