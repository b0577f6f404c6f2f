"""Executor processes that go no further than a test lets them, however busy the machine is.

A test that is to disturb streams in their middle would have to be faster than the streams; instead
it holds them there. Schedulers of executors that are held need GATED_SCHEDULER, or would take them
for hung. As a module this one runs a real executor whose steps wait for the gate.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from executor_service.steps import PendingStep, Runner, StepInput

# The file that says how far they may go; without one, or while it is empty, as far as they like.
GATE = "STEP_GATE"
GATED_EXECUTOR = "tests.support.processes.gate"
GATED_SCHEDULER = ("--step-timeout-s", "86400", "--step-patience-s", "86400")
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Gate:
    """Control of all executors that have `path` as GATE."""

    path: Path

    def hold(self, num_tokens: int) -> None:
        """Holds each step that would give a sequence more than `num_tokens` output tokens."""
        self._tell(f"hold {num_tokens}")

    def slow_down(self, step_s: float) -> None:
        """Makes each step take `step_s`."""
        self._tell(f"slow {step_s}")

    def release(self) -> None:
        """Lets all steps go on."""
        self._tell("")

    def _tell(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


@dataclass(frozen=True, slots=True)
class GatedRunner:
    """Computes as `runner` does, when it may."""

    runner: Runner
    path: Path

    def begin(self, step: StepInput) -> PendingStep | None:
        lengths = step.num_computed_tokens + step.num_new_tokens - step.num_prompt_tokens
        # The token that a row samples is one more.
        num_tokens = int((lengths + step.samples).max(initial=0))
        while (word := self._told()) and word[0] == "hold" and num_tokens > int(word[1]):
            time.sleep(_POLL_S)
        if word and word[0] == "slow":
            time.sleep(float(word[1]))
        return self.runner.begin(step)

    def _told(self) -> list[str]:
        return self.path.read_text().split() if self.path.exists() else []


def gated(runner: Runner) -> Runner:
    """`runner`, which waits for the test if there is one that holds it."""
    path = os.environ.get(GATE)
    return runner if path is None else GatedRunner(runner, Path(path))


def main() -> int:
    """Runs an executor whose steps wait for the gate; returns its exit code."""
    # Executors without a model use a gate, too: they import no torch.
    from executor_service import __main__ as executor
    from executor_service import engine_loader
    from executor_service.config import ExecutorConfig

    load = engine_loader.load_engine

    def load_gated(config: ExecutorConfig, executor_epoch: int) -> engine_loader.LoadedEngine:
        loaded = load(config, executor_epoch)
        return replace(loaded, runner=gated(loaded.runner))

    engine_loader.load_engine = load_gated
    return executor.main()


if __name__ == "__main__":
    sys.exit(main())
