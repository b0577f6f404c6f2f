"""Schedulers die under a gateway, and the gateway itself is stopped: real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from splitserve_client import SamplingParams, Tokenizer
from tests.support.fakes.fake_truth import expected_completions
from tests.support.processes.gateway_process import GatewayProcess, gateway_process, start_gateway
from tests.support.processes.mortal_scheduler import MortalScheduler, mortal_scheduler
from tests.support.processes.patience import PATIENCE_S

# A machine with much other work takes its time.
pytestmark = pytest.mark.timeout(1800)

PROMPT = "one two three"


def expected_text(served: MortalScheduler, seed: int, max_tokens: int) -> str:
    paths = served.executor.tokenizer_files
    files = {name: path.read_bytes() for name, path in paths.items()}
    tokenizer = Tokenizer.from_files(files)
    prompt = tokenizer.encode(PROMPT)
    params = SamplingParams(seed=seed, max_tokens=max_tokens)
    (completion,) = expected_completions(prompt, params, vocab_size=served.executor.vocab_size)
    whole = tokenizer.decode([*prompt, *completion.token_ids])
    return whole[len(tokenizer.decode(prompt)) :]


async def read(gateway: GatewayProcess, **body: object) -> tuple[str, list[dict[str, Any]]]:
    """The text of a streamed completion, and its events."""
    events = [event async for event in gateway.events({"prompt": PROMPT, **body})]
    texts = [choice["text"] for event in events for choice in event.get("choices", ())]
    return "".join(texts), events


async def last_of_response(
    gateway: GatewayProcess, began: asyncio.Event, **fields: object
) -> dict[str, Any]:
    """The last event of a streamed response; `began` is set with its first."""
    last: dict[str, Any] = {}
    body = {"input": "one", "stream": True, **fields}
    async with gateway.http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            began.set()
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
    return last


async def test_streams_go_on_when_their_scheduler_is_killed_and_comes_back(tmp_path: Path) -> None:
    async with mortal_scheduler(tmp_path) as served, gateway_process(served.address) as gateway:
        await gateway.wait_ready()
        served.watch.hold(after=25)
        reading = [
            asyncio.create_task(read(gateway, seed=seed, max_tokens=60)) for seed in range(8)
        ]
        await served.watch.wait_held()
        await served.kill()
        served.watch.release()
        await served.start()
        texts = [text for text, _ in await asyncio.gather(*reading)]

        assert texts == [expected_text(served, seed, 60) for seed in range(8)]


async def test_another_scheduler_serves_when_one_is_killed_until_it_is_back(tmp_path: Path) -> None:
    async with (
        mortal_scheduler(tmp_path) as first,
        mortal_scheduler(tmp_path) as second,
        gateway_process(first.address, second.address) as gateway,
    ):
        await gateway.wait_ready()
        await first.kill()
        for seed in range(6):
            text, _ = await read(gateway, seed=seed, max_tokens=5)
            assert text == expected_text(second, seed, 5)
        await first.start()
        await second.kill()
        await gateway.wait_ready()
        num_steps = first.executor.num_steps
        text, _ = await read(gateway, seed=9, max_tokens=5)
        assert text == expected_text(first, 9, 5)
        assert first.executor.num_steps > num_steps


async def test_stream_ends_when_another_model_is_served_by_its_scheduler(tmp_path: Path) -> None:
    async with mortal_scheduler(tmp_path) as served, gateway_process(served.address) as gateway:
        await gateway.wait_ready()
        served.watch.hold()
        reading = asyncio.create_task(read(gateway, seed=1, max_tokens=60))
        began = asyncio.Event()
        responding = asyncio.create_task(last_of_response(gateway, began, max_output_tokens=60))
        await served.wait_requests(2)
        await served.watch.wait_held()
        served.watch.hold(after=5)
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        await served.watch.wait_held()
        await served.kill()
        served.watch.release()
        await served.executor.stop()
        served.executor.digest = "beef" * 16
        await served.executor.start()
        await served.start()

        text, events = await reading
        assert expected_text(served, 1, 60).startswith(text)
        assert events[-1]["error"]["code"] == "model_changed"
        last = await responding
        assert last["type"] == "response.failed"
        assert "model" in last["response"]["error"]["message"]
        await gateway.wait_ready()
        text, _ = await read(gateway, seed=2, max_tokens=5)
        assert text == expected_text(served, 2, 5)


@pytest.mark.parametrize("is_impatient", [False, True])
async def test_gateway_drains_when_it_is_told_to_stop(tmp_path: Path, is_impatient: bool) -> None:
    flags = ["--drain-timeout-s", "600" if is_impatient else "0.5"]
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address, flags=flags) as gateway,
    ):
        await gateway.wait_ready()
        served.watch.hold(after=5)
        reading = asyncio.create_task(read(gateway, seed=1, max_tokens=60))
        await served.watch.wait_held()
        gateway.process.send_signal(signal.SIGTERM)
        if is_impatient:
            await gateway.wait_ready(503)
            gateway.process.send_signal(signal.SIGTERM)

        text, events = await reading
        assert expected_text(served, 1, 60).startswith(text)
        assert events[-1]["error"]["code"] == "draining"
        assert await gateway.exit_code() == 0


async def test_gateway_finishes_what_is_open_when_the_parent_is_gone(tmp_path: Path) -> None:
    flags = ["--exit-on-stdin-eof", "--drain-timeout-s", "3600"]
    async with (
        mortal_scheduler(tmp_path) as served,
        gateway_process(served.address, flags=flags) as gateway,
    ):
        await gateway.wait_ready()
        served.watch.hold(after=5)
        reading = asyncio.create_task(read(gateway, seed=1, max_tokens=30))
        await served.watch.wait_held()
        assert gateway.process.stdin is not None
        gateway.process.stdin.close()
        gateway.process.stdin = None
        await gateway.wait_ready(503)
        served.watch.release()

        assert (await reading)[0] == expected_text(served, 1, 30)
        assert await gateway.exit_code() == 0


async def test_gateway_says_in_one_line_that_its_port_is_in_use() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = start_gateway(["127.0.0.1:1"], f"127.0.0.1:{port}")
    _, error = await asyncio.to_thread(process.communicate)
    server.close()

    line = f"splitserve gateway: cannot listen on 127.0.0.1:{port}: the port is in use\n"
    assert (process.returncode, (error or b"").decode()) == (1, line)
