"""An executor, as a process, that dies or hangs of requests with certain seeds.

DEADLY_REQUEST=KIND:SEED:LENGTH, KIND `die` or `hang`: in a step that has a row with this seed and
so many tokens.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from executor_service.__main__ import main
from executor_service.runner.model_runner import ModelRunner
from executor_service.steps.step import PendingStep, StepInput

MODULE = "tests.support.processes.mortal_executor"
VARIABLE = "DEADLY_REQUEST"


def _make_mortal() -> None:
    kind, seed, length = os.environ[VARIABLE].split(":")
    begin = ModelRunner.begin

    def begin_or_die(self: ModelRunner, step: StepInput) -> PendingStep | None:
        lengths = step.num_computed_tokens + step.num_new_tokens
        if ((step.seeds == int(seed)) & (lengths >= int(length))).any():
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return begin(self, step)

    ModelRunner.begin = begin_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    _make_mortal()
    sys.exit(main())
