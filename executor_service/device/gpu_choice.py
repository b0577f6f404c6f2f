"""Where a model runs: on the CPU, or on which of several GPUs."""

from __future__ import annotations

from executor_service.errors import BackendUnavailable


def choose_device(asked: str, index: int, num_gpus: int) -> str:
    """Where torch is to put a model: on "cpu", or on "cuda:0" and so on.

    `asked`: as --device takes it. `index`: of the GPU; beyond the last of `num_gpus` it starts
    over, so that executors may be more than GPUs. Raises BackendUnavailable if there is none.
    """
    if asked == "cpu" or (asked == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus == 0:
        raise BackendUnavailable("device cuda: torch sees no GPU here; allowed: auto or cpu")
    return f"cuda:{index % num_gpus}"
