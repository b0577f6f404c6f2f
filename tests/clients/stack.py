"""A scheduler, an executor and a gateway as processes, with the bundled model or another."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import START_TIMEOUT_S, Processes, processes

MODEL = "splitserve"
BUNDLED = ROOT / "executor_service" / "bundled_model"
CHAT_TEMPLATE = Path(__file__).parent / "vllm_recording" / "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`base_url` of the gateway, `scheduler`: address, `model`: its name for clients."""

    base_url: str
    scheduler: str
    model: str


def model_with_tools(folder: Path) -> Path:
    """The bundled model in `folder`, with the chat template that was recorded with vLLM."""
    for file in BUNDLED.iterdir():
        source = CHAT_TEMPLATE if file.name == CHAT_TEMPLATE.name else file
        (folder / file.name).symlink_to(source)
    return folder


@contextmanager
def served_model(folder: Path) -> Iterator[ServedModel]:
    """The bundled model in float32, over HTTP; `folder` is empty. Raises AssertionError."""
    with served(model_with_tools(folder)) as running:
        yield running


@contextmanager
def served(model: Path, *gateway_options: str) -> Iterator[ServedModel]:
    """The model in the folder `model`, in float32, over HTTP. Raises AssertionError."""
    with processes(model) as running:
        running.start_scheduler()
        running.start_executor("--dtype", "float32", "--served-model-name", MODEL)
        address = reserve_address()
        running.start_gateway("--http", address, *gateway_options)
        _wait_ready(address, running)
        base_url = f"http://{address}"
        yield ServedModel(base_url, running.address, MODEL)


def _wait_ready(address: str, running: Processes) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        assert running.are_alive(), "a process ended"
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise AssertionError("the gateway did not become ready")
