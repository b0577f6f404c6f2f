"""Every question of the dashboard has an answer when a stack is under load and loses an executor.

`splitserve bench` is the load, over HTTP. Few blocks, so that requests are preempted and swapped.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

from tests.support.observability.observed import Observed, observed
from tests.support.observability.prometheus import (
    OBSERVABILITY,
    Prometheus,
    needs_prometheus,
    prometheus,
)
from tests.support.processes.forked import run_process

pytestmark = needs_prometheus

DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "splitserve.json").read_text())
SCARCE = ("--num-device-blocks", "24", "--num-host-blocks", "24")
LOAD = (
    *("--concurrency=16", "--requests=32", "--prompt-tokens=8", "--output-tokens=40", "--quiet"),
    *("--shared-prefix=8:2", "--token-range=1:100"),
)


async def bench(running: Observed) -> None:
    base_url = str(running.http.base_url)
    done = await asyncio.to_thread(run_process, "splitserve_bench", f"{base_url}/v1", *LOAD)
    assert done.returncode == 0, done.stderr


async def unanswered(found: Prometheus) -> list[tuple[str, str]]:
    """Questions without an answer, with their panels."""
    nothing = []
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            asked = expression.replace("$__rate_interval", "1h").replace("$executor", ".*")
            answer = await found.get("query", query=asked)
            if all(math.isnan(float(each["value"][1])) for each in answer["result"]):
                nothing.append((panel["title"], expression))
    return nothing


async def test_dashboard_has_answers_when_everything_happens(tmp_path: Path) -> None:
    async with (
        observed(tmp_path, executor=SCARCE) as running,
        prometheus(tmp_path, running.metrics) as found,
    ):
        await found.wait_read(4)
        running.gate.hold(num_tokens=4)
        loading = asyncio.create_task(bench(running))
        await found.wait_for("min(splitserve_num_requests_running) > bool 0", 1)
        running.processes.kill_executor(next(iter(running.processes.executors)))
        await found.wait_for('sum(splitserve_num_executors{state="serving"})', 1)
        running.gate.release()
        await loading
        await found.wait_for("sum(splitserve_requests_total)", 33)
        preempted = await found.value("sum(splitserve_preemptions_total)")
        nothing = await unanswered(found)
        rules = await found.get("rules")

    assert preempted
    assert nothing == []
    assert {rule["health"] for rule in rules["groups"][0]["rules"]} == {"ok"}
