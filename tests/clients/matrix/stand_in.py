"""Server that answers as OpenAI's does, with the same few texts, and keeps the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
_RESPONSE_USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}
_SIMPLE = {"string": "Oslo", "integer": 1, "number": 1.5, "boolean": True, "null": None}
_TEXT = '{"city": "Oslo", "celsius": 1.5}'


class StandIn(ThreadingHTTPServer):
    """`requests`: path and body of each POST so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, Json]] = []

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """A running server."""
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        self.server.requests.append((path, body))
        if path.endswith("/embeddings"):
            self._send(_embeddings(body))
            return
        answers = _response if path.endswith("/responses") else _chat
        whole, events = answers(body)
        if not body.get("stream"):
            self._send(whole)
            return
        lines = [
            f"event: {event.get('type', 'message')}\ndata: {json.dumps(event)}\n\n"
            for event in events
        ]
        lines += ["data: [DONE]\n\n"] if answers is _chat else []
        self._send("".join(lines), "text/event-stream")

    def _send(self, content: Json | str, media_type: str = "application/json") -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(200)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _chat(body: Json) -> tuple[Json, list[Json]]:
    called = None
    if not any(message["role"] == "tool" for message in body["messages"]):
        called = _called([tool["function"] for tool in body.get("tools") or ()])
    message: Json = {"role": "assistant", "content": _TEXT, "refusal": None}
    if called is not None:
        call = {"id": "call_1", "type": "function", "function": called}
        message |= {"content": None, "tool_calls": [call]}
    elif (form := body.get("response_format") or {}).get("type") == "json_schema":
        message["content"] = json.dumps(_example(form["json_schema"]["schema"]))
    reason = "stop" if called is None else "tool_calls"
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    whole = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    delta = {name: value for name, value in message.items() if value is not None}
    if called is not None:
        delta["tool_calls"] = [{**call, "index": 0} for call in delta["tool_calls"]]
    chunks = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": reason}],
    ]
    events = [{**head, "object": "chat.completion.chunk", "choices": each} for each in chunks]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**events[0], "choices": [], "usage": _USAGE})
    return {**head, "object": "chat.completion", "choices": [whole], "usage": _USAGE}, events


def _response(body: Json) -> tuple[Json, list[Json]]:
    given = body["input"] if isinstance(body["input"], list) else []
    called = None
    if not any(item.get("type") == "function_call_output" for item in given):
        called = _called(body.get("tools") or ())
    text = _TEXT
    if (form := (body.get("text") or {}).get("format") or {}).get("type") == "json_schema":
        text = json.dumps(_example(form["schema"]))
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item: Json = {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
    if called is not None:
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", **called}
    item["status"] = "completed"
    head = {"id": "resp_1", "object": "response", "created_at": 1, "model": body["model"]}
    head |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
    whole = {**head, "status": "completed", "output": [item], "usage": _RESPONSE_USAGE}
    events: list[Json] = [
        {"type": "response.created", "response": {**head, "status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    if called is None:
        place = {"output_index": 0, "content_index": 0, "item_id": "msg_1"}
        delta = {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
        events.insert(2, delta)
    return whole, [{**event, "sequence_number": at} for at, event in enumerate(events)]


def _called(functions: list[Json] | tuple[()]) -> Json | None:
    """A call of the first of `functions`."""
    if not functions:
        return None
    arguments = json.dumps(_example(functions[0]["parameters"]))
    return {"name": functions[0]["name"], "arguments": arguments}


def _example(schema: Json, root: Json | None = None) -> object:
    """A value that matches a simple schema."""
    root = root or schema
    if "$ref" in schema:
        found: Any = root
        for key in schema["$ref"].split("/")[1:]:
            found = found[key]
        return _example(found, root)
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], root)
    if schema.get("type", "object") == "object":
        properties: Mapping[str, Json] = schema.get("properties", {})
        return {name: _example(each, root) for name, each in properties.items()}
    if schema["type"] == "array":
        return [_example(schema["items"], root)]
    return _SIMPLE[schema["type"]]


def _embeddings(body: Json) -> Json:
    # Eight bytes of base64: two numbers of 32 bits, 0.0.
    vector: object = "AAAAAAAAAAA=" if body.get("encoding_format") == "base64" else [0.0, 0.0]
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index in range(len(body["input"]))
    ]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return {"object": "list", "model": body["model"], "data": data, "usage": usage}
