"""An executor that writes down which kernels it compiles, or whose recordings break off.

    python -m benchmarks.gpu_check.watched_executor FLAGS

COMPILED in the environment names a file that gets the name of each kernel, a line each; with
BREAK_RECORDINGS every recording of a CUDA graph fails as one does that waits for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

COMPILED = "GPU_CHECK_COMPILED"
BREAK_RECORDINGS = "GPU_CHECK_BREAK_RECORDINGS"


def main() -> int:
    """As the executor's."""
    if COMPILED in os.environ:
        _write_down_compilations(Path(os.environ[COMPILED]))
    if BREAK_RECORDINGS in os.environ:
        break_recordings()
    from executor_service.__main__ import main as run

    return run()


def _write_down_compilations(path: Path) -> None:
    try:
        from benchmarks.gpu_check.compilations import tell

        path.touch()

        def add(name: str) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")

        tell(add)
    except ImportError:  # without Triton nothing is compiled
        path.touch()


def break_recordings() -> None:
    """In this process, from now on."""
    import torch

    from executor_service.device import CudaGraphs

    record = CudaGraphs.record

    def record_and_break(self: CudaGraphs, run: Callable[[], None]) -> Callable[[], None]:
        def run_and_wait() -> None:
            run()
            if torch.cuda.is_current_stream_capturing():
                torch.ones(1, device="cuda").item()

        return record(self, run_and_wait)

    CudaGraphs.record = record_and_break  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
