"""An executor process as it is, but for its steps: they wait for a test (`gate`)."""

from __future__ import annotations

import sys
from dataclasses import replace

from executor_service import __main__ as executor
from executor_service import engine_loader
from executor_service.config import ExecutorConfig
from tests.support.processes.gate import gated

MODULE = "tests.support.processes.gated_executor"


def main() -> int:
    """The exit code of the executor."""
    load = engine_loader.load_engine

    def load_gated(config: ExecutorConfig, executor_epoch: int) -> engine_loader.LoadedEngine:
        loaded = load(config, executor_epoch)
        return replace(loaded, runner=gated(loaded.runner))

    engine_loader.load_engine = load_gated
    return executor.main()


if __name__ == "__main__":
    sys.exit(main())
