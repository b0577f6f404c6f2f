"""One request to an HTTP server and its answer: `send`."""

from __future__ import annotations

import http.client
import json
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.support.processes.patience import PATIENCE_S

# Stands for the name of whatever model the server has.
MODEL = "THE-MODEL"


@dataclass(frozen=True, slots=True)
class Request:
    """`body`: JSON to post, or text that is posted as it is; None is a GET."""

    path: str
    body: dict[str, object] | str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: JSON, else text. `events`: of a stream, each [event or None, JSON or "[DONE]"]."""

    status: int
    content_type: str
    body: Any = None
    events: list[list[Any]] | None = None

    @classmethod
    def from_json(cls, recorded: dict[str, Any]) -> Answer:
        return cls(**recorded)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def send(base_url: str, request: Request, model: str) -> Answer:
    """Sends `request`; MODEL in it becomes `model`. Raises OSError, and ValueError for no SSE."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=PATIENCE_S)
    try:
        if request.body is None:
            connection.request("GET", request.path.replace(MODEL, model))
        else:
            text = request.body if isinstance(request.body, str) else json.dumps(request.body)
            body = text.replace(json.dumps(MODEL), json.dumps(model)).encode()
            connection.request("POST", request.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content_type = (response.getheader("Content-Type") or "").partition(";")[0]
        return _parse(response.status, content_type, response.read().decode())
    finally:
        connection.close()


def _parse(status: int, content_type: str, text: str) -> Answer:
    if content_type == "text/event-stream":
        return Answer(status, content_type, events=_events(text))
    is_json = content_type == "application/json"
    return Answer(status, content_type, body=json.loads(text) if is_json else text)


def _events(text: str) -> list[list[Any]]:
    """The events of a whole stream, without ids.

    Comments (lines that begin with a colon) are none.
    """
    events = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        if not fields.keys() <= {"event", "data", "id"} or len(fields) != len(lines):
            raise ValueError(f"not an event as servers of this kind send: {block[:200]!r}")
        data = fields["data"]
        events.append([fields.get("event"), data if data == "[DONE]" else json.loads(data)])
    return events
