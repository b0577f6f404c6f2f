"""What `splitserve serve` knows, and can find out, before anything slow starts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from splitserve_options.model_folder import NoCheckpoint, find_checkpoint
from splitserve_options.option import BUNDLED_MODEL

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_EXECUTOR_MODULES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What the supervisor itself has to know. `started_at`: monotonic seconds."""

    address: str
    model: str
    with_demo: bool
    drain_timeout_s: float
    started_at: float


class CannotServe(Exception):
    """Serving is impossible; the message is one line for people."""


def check_model(model: str) -> None:
    """Raises CannotServe if `model` is clearly no checkpoint; the executor looks closer."""
    missing = [name for name in _EXECUTOR_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotServe(
            f"executors need {' and '.join(missing)}: pip install 'splitserve[executor]'"
        )
    if model == BUNDLED_MODEL:
        return
    try:
        find_checkpoint(model)
    except NoCheckpoint as error:
        raise CannotServe(f"--model {error}") from error


def reachable_address(listen: str) -> str:
    """The address under which a server that listens on `listen` is reached from here."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
