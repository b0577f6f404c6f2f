"""Tests that no log at level debug has what clients send."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest

from splitserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from splitserve_client import AsyncClient, SamplingParams, SplitserveError
from splitserve_common import CONTINUED
from splitserve_options import BUNDLED_MODEL
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import Processes, processes, wait_ready
from tests.support.security.credentials import bearer

SECRET = "canary"
# Each kind of content has a canary of its own, so that a failure names the way out.
KEY = f"sk-ss-{SECRET}key-{SECRET}secret"
HEADERS = {
    **dict(bearer(KEY)),
    "cookie": f"session={SECRET}cookie",
    "x-header": f"{SECRET}header",
}
PROMPT_TOKENS = [1021, 417, 1203, 911, 1017, 88]
EVENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING) [\w.]+ [a-z_]+( |$)")

# gRPC's own library in C writes, too.
OF_GRPC = re.compile(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \w+\.cc:\d+\] ")


def canary(kind: str) -> str:
    return f"{SECRET}{kind}\n\x1b[2J\u202e"


def message(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8}


def schema(content: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


def tool(name: str, parameters: object) -> list[object]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


# Valid and invalid in every part that has content; whatever the answer is.
BODIES: tuple[dict[str, Any], ...] = (
    message(canary("message")),
    message(canary("stopped")) | {"stop": [canary("stop")], "bad_words": [canary("badword")]},
    message(canary("user")) | {"user": canary("user"), "cache_salt": canary("salt")},
    message([{"type": "text", "text": canary("part")}]),
    message("long") | {"messages": [{"role": "user", "content": canary("long") * 20000}]},
    message("schema") | {"response_format": schema({"enum": [canary("enum")]})},
    message("schema") | {"response_format": schema({"type": canary("schematype")})},
    message("schema") | {"response_format": schema({"pattern": f"({SECRET}pattern"})},
    message("lark") | {"structured_outputs": {"grammar": f'start: "{SECRET}lark'}},
    message("regex") | {"structured_outputs": {"regex": f"({SECRET}regex"}},
    message("choice") | {"structured_outputs": {"choice": [canary("choice")]}},
    message("tool") | {"tools": tool(f"{SECRET}tool", {"type": "object"})},
    message("tool") | {"tools": tool("x", {"type": canary("toolschema")})},
    message("kwargs") | {"chat_template_kwargs": {"a": canary("kwargs")}},
    message("template") | {"chat_template": canary("template")},
    message("role") | {"messages": [{"role": canary("role"), "content": "x"}]},
    message("temperature") | {"temperature": canary("temperature")},
    message("model") | {"model": canary("model")},
    message("unknown") | {f"{SECRET}field": canary("unknown")},
    message("range") | {"top_p": 7.5, "user": canary("range")},
    message("images") | {"messages": [{"role": "user", "content": [{"type": canary("image")}]}]},
)
# Each with the field that has the prompt.
PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/tokenize": "messages",
}
CHAT, COMPLETIONS, *_ = PATHS


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[tuple[Processes, str]]:
    """All processes at log level debug, with a journal; and the address of the gateway."""
    http = reserve_address()
    with processes(Path(BUNDLED_MODEL), tmp_path / "log") as served:
        debug = ("--log-level", "debug")
        served.start_scheduler(*debug, "--journal", str(tmp_path / "journal"))
        served.start_executor(*debug)
        served.start_gateway(*debug, "--http", http)
        await served.wait_until(lambda executors: len(executors) == 1)
        async with httpx2.AsyncClient(base_url=f"http://{http}", trust_env=False) as client:
            await wait_ready(client)
        yield served, http


async def ask_over_http(http: str) -> list[str]:
    """Returns the texts that were generated."""
    outputs = []
    async with httpx2.AsyncClient(
        base_url=f"http://{http}", headers=HEADERS, timeout=PATIENCE_S, trust_env=False
    ) as client:
        for path, field in PATHS.items():
            for body in BODIES:
                content = {name: body[name] for name in body if name != "messages"}
                content[field] = canary("prompt") if field == "prompt" else body["messages"]
                answer = await client.post(path, json=content)
                assert answer.status_code < 500, answer.text
                if answer.status_code == 200 and "choices" in answer.json():
                    (choice,) = answer.json()["choices"]
                    outputs.append(choice.get("text") or choice["message"]["content"] or "")
        for broken in (f'{{"prompt": "{SECRET}json'.encode(), SECRET.encode() + b"bytes\xff"):
            await client.post(COMPLETIONS, content=broken)
        await client.get(f"/{SECRET}path?{SECRET}query={SECRET}")
        await client.request(f"{SECRET}METHOD", "/v1/models")
        async with client.stream(
            "POST", CHAT, json=message(canary("left")) | {"stream": True, "max_tokens": 400}
        ):
            pass  # and leaves
    return outputs


async def ask_over_grpc(address: str) -> list[list[int]]:
    """Returns the tokens that were generated."""
    async with AsyncClient(address, PATIENT) as client:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        completion = await client.complete(PROMPT_TOKENS, params)
        for prompt in ([2**20], PROMPT_TOKENS * 4000):
            with pytest.raises(SplitserveError):
                await client.complete(prompt, params)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        submit = scheduler_pb2.SessionSubmit(handle=1, credential=KEY)
        for request in (submit, submit):  # the handle is in use, or its request is refused
            session = stub.Session()
            await session.write(scheduler_pb2.SessionRequest(submit=request))
            await session.read()
            session.cancel()
        undecodable = channel.unary_stream("/splitserve.scheduler.v1.SchedulerService/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            await undecodable(f"{SECRET}bytes".encode(), metadata=[("authorization", KEY)]).read()
    return [list(completion.token_ids)]


async def test_no_log_has_what_clients_say(running: tuple[Processes, str], tmp_path: Path) -> None:
    served, http = running
    texts = await ask_over_http(http)
    outputs = await ask_over_grpc(served.address)
    # An executor that is lost while it works, and the end of all, are told, too.
    async with AsyncClient(served.address, PATIENT) as client:
        lost = asyncio.create_task(client.complete(PROMPT_TOKENS, SamplingParams(max_tokens=400)))
        await served.wait_until(lambda executors: executors[0].num_running_requests > 0)
        (address,) = served.executors
        served.kill_executor(address)
        await served.wait_until(lambda executors: not executors)
        lost.cancel()
    for process in (served.gateway, served.scheduler):
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, PATIENCE_S)

    log = (tmp_path / "log").read_text()
    lines = log.splitlines()
    # It did see all three processes, and they had nothing to say of failures of their own.
    for event in ("upstream_ready", "executor_lost", "model_loaded", "scheduler_stopped"):
        assert event in log
    assert [line for line in lines if not (EVENT.match(line) or OF_GRPC.match(line))] == []
    assert CONTINUED not in log
    found = [line for line in lines if SECRET in line.lower()]
    assert found == []
    generated = [text for text in texts if len(text.split()) > 3]
    assert generated
    assert [text for text in generated if text in log or repr(text)[1:-1] in log] == []
    for tokens in (PROMPT_TOKENS, *outputs):
        written = ", ".join(map(str, tokens[:4]))
        assert written not in log
    assert not any(SECRET in name for name in os.listdir(tmp_path))
