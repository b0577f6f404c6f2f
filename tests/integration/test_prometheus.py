"""A real Prometheus reads a scheduler that serves, and answers what the dashboard asks."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.metrics.scheduler_metrics import SchedulerMetrics
from scheduler_service.service.readiness import Readiness
from splitserve_client import AsyncClient, SamplingParams
from splitserve_metrics.address import MetricsAddress
from tests.support.fakes.fake_executor import FakeExecutor
from tests.support.fakes.listed_audit import ListedAudit
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.scheduler_in_process import scheduler_in_process

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "splitserve.json").read_text())
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: splitserve-scheduler
    static_configs: [{{targets: ["{target}"]}}]
"""
INTERVAL = "$__rate_interval"
# Whatever happens; others wait for a preemption, or a gateway.
FILLED = (
    "Ready schedulers",
    "Executors",
    "Time to first token",
    "Inter-token latency",
    "Queue time",
    "Tokens",
    "Requests that ended",
    "Requests now",
    "KV blocks on devices",
    "Parts of a step (scheduler)",
    "Rows and tokens of a step",
)
# Between two looks at something that another process does.
LOOK_S = 0.1

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus: Debian has it"
)


class Prometheus:
    """One that runs."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    async def get(self, path: str, **query: str) -> Any:  # noqa: ANN401
        """The data of an answer; None while it does not answer."""
        target = f"/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return None
        writer.write(f"GET {target} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 503 " in head.splitlines()[0]:
            return None
        found = json.loads(body)
        assert found["status"] == "success", found
        return found["data"]

    async def value(self, expression: str) -> float | None:
        """Of an expression with one value, as soon as it has one."""
        data = await self.get("query", query=expression)
        return float(data["result"][0]["value"][1]) if data and data["result"] else None

    async def wait_for(self, expression: str, expected: float) -> None:
        """Until it has that value."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.value(expression) != expected:  # noqa: ASYNC110  (another process)
                await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """One that reads `target`."""
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=OBSERVABILITY / "alerts.yml", target=target))
    address = reserve_address()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Prometheus(address)
    finally:
        process.kill()
        await process.wait()


async def test_prometheus_answers_what_the_dashboard_asks_of_a_scheduler_that_serves(
    tmp_path: Path,
) -> None:
    metrics = SchedulerMetrics(MetricsAddress("127.0.0.1:0"), time.monotonic_ns)
    audit = metrics.counted(ListedAudit(), lambda _: False)
    async with (
        scheduler_in_process(FakeExecutor(), audit=audit, observer=metrics.observer) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        target = await metrics.serve(scheduler.cluster, lambda: Readiness.READY)
        async with prometheus(tmp_path, target) as reading:
            await client.complete([1, 2, 3], SamplingParams(seed=1, max_tokens=12))
            await reading.wait_for("sum(splitserve_output_tokens_total)", 12.0)
            await reading.wait_for('sum(splitserve_kv_blocks{pool="device"})', 64.0)
            await reading.wait_for('max(splitserve_ready{readiness="READY"})', 1.0)
            # A rate is of two readings at least.
            await reading.wait_for(
                "max(count_over_time(splitserve_output_tokens_total[1h])) >= bool 2", 1.0
            )
            rules = await reading.get("rules")
            answers = {
                panel["title"]: [
                    await reading.get("query", query=each["expr"].replace(INTERVAL, "1h"))
                    for each in panel["targets"]
                ]
                for panel in DASHBOARD["panels"]
            }
        await metrics.close()

    assert {rule["health"] for rule in rules["groups"][0]["rules"]} <= {"ok", "unknown"}
    assert len(answers) == len(DASHBOARD["panels"])
    assert [title for title in FILLED if not all(each["result"] for each in answers[title])] == []
