"""What `splitserve serve` can find out at once, before anything slow starts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from splitserve_rpc.option import BUNDLED_MODEL

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
_EXECUTOR_MODULES = ("torch", "transformers")


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
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise CannotServe(f"--model {model}: config.json is missing; is it a checkpoint?")
    elif directory.exists():
        raise CannotServe(f"--model {model}: not a directory")
    elif not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise CannotServe(f"--model {model}: no such directory")


def reachable_address(listen: str) -> str:
    """The address under which a server that listens on `listen` is reached from here."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
