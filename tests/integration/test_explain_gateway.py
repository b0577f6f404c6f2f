"""Ids that callers of the gateway have in hand, and `splitserve doctor` of a gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from splitserve_client import AsyncClient
from tests.support.processes.forked import run_process
from tests.support.processes.gateway import running_gateway, text_executor


async def test_request_is_explained_by_the_id_of_its_answer_and_of_its_http_request(
    tmp_path: Path,
) -> None:
    async with (
        running_gateway(text_executor(tmp_path)) as gateway,
        AsyncClient(gateway.service.scheduler.address) as operators,
    ):
        body = {"messages": [{"role": "user", "content": "a"}], "seed": 1, "max_tokens": 3}
        chat = await gateway.http.post("/v1/chat/completions", json=body)
        batch = {"prompt": ["a", "b"], "seed": 1, "max_tokens": 2, "request_id": "job.7"}
        completions = await gateway.http.post("/v1/completions", json=batch)
        ids = [chat.json()["id"], chat.headers["x-request-id"]]
        (by_answer,), (by_exchange,) = [
            (await operators.explain(request_id)).lives for request_id in ids
        ]
        of_batch = [
            {life.request_id for life in (await operators.explain(request_id)).lives}
            for request_id in (completions.json()["id"], completions.headers["x-request-id"])
        ]

    assert by_answer.request_id == by_exchange.request_id
    assert by_answer.events[-1].numbers["num_output_tokens"] == 3
    assert completions.json()["id"] == "cmpl-job.7"
    assert of_batch[0] == of_batch[1]
    assert len(of_batch[0]) == 2


async def test_doctor_finds_nothing_wrong_with_a_gateway_that_is_well(tmp_path: Path) -> None:
    async with running_gateway(text_executor(tmp_path)) as gateway:
        options = (f"--address={gateway.service.scheduler.address}", f"--gateway={gateway.url}")
        command = ("doctor", "--json", "--for=gateway", *options)
        done = await asyncio.to_thread(run_process, "splitserve_cli", *command)
        secured = await asyncio.to_thread(
            run_process,
            *("splitserve_cli", "doctor", f"--gateway={gateway.url.replace('http', 'https')}"),
        )

    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert [each for each in findings.values() if each["state"] == "wrong"] == []
    assert done.returncode == 0
    assert "clock of the gateway" in findings
    assert any(name.startswith("models of ") for name in findings)
    assert (secured.returncode, "it speaks plain text" in secured.stdout) == (1, True)
