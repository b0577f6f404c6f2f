"""An executor process without a model: all of it is real but the runner, which is a FakeRunner.

Without torch it starts in a second. `expected_completions` computes what its clients must get. A
row that reads what is not its own is an error in the log. Options are those of an executor.

DEADLY_REQUEST=KIND:SEED:LENGTH, KIND `die` or `hang`, is what it does in a step that has a row with
this seed and so many tokens. GATE holds its steps (`gate`). TOKENIZER is a folder whose
`tokenizer.json` it offers. SICKNESS=KIND:PATH, KIND `fails` or `not_a_number`: as long as there is
a file at PATH, all of its steps fail, or all of its rows.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

from executor_service import __main__ as executor
from executor_service.config import ExecutorConfig
from executor_service.steps import (
    SAMPLING_FEATURES,
    ExecutorInfo,
    ExecutorLimits,
    FinishedStep,
    ModelInfo,
    RowStatus,
    StepInput,
    TrialStep,
)
from tests.support.fakes.fake_model import VOCAB_SIZE
from tests.support.fakes.fake_runner import FakeRunner, StepFault, no_fault
from tests.support.processes.gate import gated

MODULE = "tests.support.processes.light_executor"
DEADLY_REQUEST = "DEADLY_REQUEST"
SICKNESS = "SICKNESS"
TOKENIZER = "TOKENIZER"
MAX_MODEL_LEN = 1024
# That streams last, without taking a core from others.
_STEP_S = 0.01
_BLOCK_SIZE = 4

_log = logging.getLogger("light_executor")


@dataclass(frozen=True, slots=True)
class _LightRunner:
    """`deadly`: kind, seed and length of what it does not survive.

    `sickness`: kind of it, and the file that is there as long as it lasts.
    """

    runner: FakeRunner
    deadly: tuple[str, int, int] | None
    sickness: tuple[str, Path] | None

    def begin(self, step: StepInput) -> FinishedStep:
        if self.deadly is not None:
            _suffer(step, *self.deadly)
        time.sleep(_STEP_S)
        is_sick = self.sickness is not None and self.sickness[1].exists()
        self.runner.fault = _sick_fault(self.sickness[0]) if self.sickness and is_sick else no_fault
        finished = self.runner.begin(step)
        for violation in self.runner.violations:
            _log.error("violation %s", violation)
        self.runner.violations.clear()
        return finished


def _sick_fault(kind: str) -> Callable[[StepInput], StepFault]:
    if kind == "fails":
        return lambda _step: StepFault(error=RuntimeError("the device is broken"))
    return lambda step: StepFault(
        rows=dict.fromkeys(step.row_ids[step.samples].tolist(), RowStatus.INVALID_LOGITS)
    )


def _suffer(step: StepInput, kind: str, seed: int, length: int) -> None:
    lengths = step.num_computed_tokens + step.num_new_tokens
    if ((step.seeds == seed) & (lengths >= length)).any():
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def _load_engine(config: ExecutorConfig, executor_epoch: int) -> SimpleNamespace:
    """Replaces `executor_service.engine_loader`, which imports torch."""
    num_device_blocks, num_host_blocks = config.num_device_blocks or 512, config.num_host_blocks
    runner = FakeRunner(
        block_size=_BLOCK_SIZE,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks or 0,
    )
    info = ExecutorInfo(
        executor_epoch=executor_epoch,
        model=ModelInfo("light", "11f7" * 16, "float32", "float32", VOCAB_SIZE, MAX_MODEL_LEN),
        block_size=_BLOCK_SIZE,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks or 0,
        block_bytes=16 * _BLOCK_SIZE,
        limits=ExecutorLimits(config.max_num_seqs, config.max_num_batched_tokens),
        features=SAMPLING_FEATURES,
        trial_step=TrialStep(64, 64 * MAX_MODEL_LEN, round(_STEP_S * 1e6)),
    )
    return SimpleNamespace(
        runner=gated(_LightRunner(runner, _deadly(), _sickness())),
        grammars=None,
        info=info,
        architecture="light",
        device="none",
        compute="none",
        tokenizer_files=_tokenizer(),
        drafts=None,
        adapters=None,
    )


def _deadly() -> tuple[str, int, int] | None:
    told = os.environ.get(DEADLY_REQUEST)
    if told is None:
        return None
    kind, seed, length = told.split(":")
    return kind, int(seed), int(length)


def _sickness() -> tuple[str, Path] | None:
    told = os.environ.get(SICKNESS)
    if told is None:
        return None
    kind, _, path = told.partition(":")
    return kind, Path(path)


def _tokenizer() -> dict[str, Path]:
    folder = os.environ.get(TOKENIZER)
    return {} if folder is None else {"tokenizer.json": Path(folder) / "tokenizer.json"}


def main() -> int:
    """The exit code of the executor."""
    loader = ModuleType("executor_service.engine_loader")
    loader.load_engine = _load_engine  # type: ignore[attr-defined]
    sys.modules[loader.__name__] = loader
    return executor.main()


if __name__ == "__main__":
    sys.exit(main())
