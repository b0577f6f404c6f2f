"""Records what vLLM's server answers to `openai_requests`, into `vllm_recording/`.

`python -m tests.clients.record_vllm http://127.0.0.1:8123`; how the server is started stands in
`vllm_recording/README.md`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.clients.exchange import Answer, Request, send
from tests.clients.openai_requests import REQUESTS

RECORDING = Path(__file__).parent / "vllm_recording"


def served_model_name(base_url: str) -> str:
    """The name of the first model that the server has."""
    return str(send(base_url, Request("/v1/models"), "").body["data"][0]["id"])


def recorded_answers(area: str) -> dict[str, Answer]:
    """What vLLM said to each request of `REQUESTS[area]`."""
    recorded = json.loads((RECORDING / f"{area}.json").read_text())
    return {name: Answer.from_json(answer) for name, answer in recorded.items()}


def record(base_url: str) -> None:
    """Sends all requests, one after the other, and writes a file for each area."""
    model = served_model_name(base_url)
    for area, requests in REQUESTS.items():
        answers = {
            name: send(base_url, request, model).to_json() for name, request in requests.items()
        }
        (RECORDING / f"{area}.json").write_text(_dumps(answers))


def _dumps(answers: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each body and each event, so that a diff can be read."""
    parts = []
    for name, answer in answers.items():
        lines = [
            f'  "{key}": [\n   ' + ",\n   ".join(map(json.dumps, value)) + "\n  ]"
            if key == "events"
            else f'  "{key}": {json.dumps(value)}'
            for key, value in answer.items()
        ]
        parts.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    record(sys.argv[1])
