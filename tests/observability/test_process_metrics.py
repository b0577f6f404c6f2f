"""Tests what processes show at `--metrics-listen`, with and without certificates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from splitserve_metrics import EXECUTOR_METRICS, GATEWAY_METRICS, SCHEDULER_METRICS
from tests.support.observability.observed import observed
from tests.support.observability.prometheus import needs_prometheus, prometheus
from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import LightProcesses
from tests.support.security.cluster import Certificates

# By which readers know each, in its certificate.
SERVER_NAMES = {
    "scheduler": "scheduler.splitserve.internal",
    "executor": "executor.splitserve.internal",
    "gateway": "localhost",
}


async def call_unknown(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError, match="unknown method"):
            await channel.unary_unary("/some.Service/Method")(b"", timeout=PATIENCE_S)


async def test_processes_show_what_they_did(tmp_path: Path) -> None:
    async with observed(tmp_path, num_executors=1) as running:
        assert await running.complete([1, 2, 3], [4, 5]) == []
        assert await running.ask_gateway() == 200
        refused = await running.http.post("/v1/completions", json={"prompt": []})
        for address in (running.client.address, *running.processes.executors):
            await call_unknown(address)
        scheduler, executor, gateway = [
            await running.read(job) for job in ("scheduler", "executor", "gateway")
        ]

    num_tokens = 2 * 8 + 4
    assert {metric.name for metric in SCHEDULER_METRICS} <= scheduler.names
    assert {metric.name for metric in EXECUTOR_METRICS} <= executor.names
    assert {metric.name for metric in GATEWAY_METRICS} <= gateway.names
    assert scheduler.value("splitserve_output_tokens_total") == num_tokens
    # What had been sent when a request ended is sampled, too.
    assert executor.value("splitserve_executor_output_tokens_total") >= num_tokens
    assert scheduler.value("splitserve_calls_refused_total", reason="METHOD_UNKNOWN") == 1
    unknown = executor.value("splitserve_executor_calls_refused_total", reason="METHOD_UNKNOWN")
    assert unknown == 1
    steps = executor.value("splitserve_executor_steps_total", status="ok")
    assert executor.value("splitserve_executor_step_rows_count") == steps
    assert executor.total("splitserve_executor_info", model="light") == 1
    assert executor.value("splitserve_executor_pool_blocks", pool="device") == 256
    answers = "splitserve_gateway_requests_total"
    assert refused.status_code == 400
    for code in ("200", "400"):
        assert gateway.value(answers, path="/v1/completions", code=code) == 1
    assert gateway.value("splitserve_gateway_schedulers", readiness="READY") == 1


@needs_prometheus
async def test_prometheus_reads_processes_elsewhere_when_it_has_a_certificate(
    tmp_path: Path,
) -> None:
    made = Certificates.make(tmp_path / "certificates", "--client", "prometheus")
    cluster = reserve_address()
    ports = {name: reserve_address().rpartition(":")[2] for name in SERVER_NAMES}
    jobs = {name: [f"127.0.0.1:{port}"] for name, port in ports.items()}

    def flags(name: str) -> list[str]:
        return [f"--metrics-listen=0.0.0.0:{ports[name]}", *made.flags(name)]

    files = made.files("prometheus")
    own = {"cert_file": str(files.cert), "key_file": str(files.key)}
    for name in ("known", "stranger"):
        (tmp_path / name).mkdir()
    believed = {
        name: {"ca_file": str(files.ca), "server_name": host} for name, host in SERVER_NAMES.items()
    }
    running = LightProcesses(tmp_path / "log")
    try:
        running.start_scheduler(f"--cluster-listen={cluster}", *flags("scheduler"))
        running.start_executor(f"--scheduler={cluster}", *flags("executor"))
        running.start_gateway("--http", reserve_address(), *flags("gateway"))
        operator = replace(PATIENT, credentials=made.client("operator"))
        await running.wait_until(lambda executors: len(executors) == 1, cluster, operator)
        certified = {name: config | own for name, config in believed.items()}
        async with (
            prometheus(tmp_path / "known", jobs, tls=certified) as known,
            prometheus(tmp_path / "stranger", jobs, tls=believed) as stranger,
        ):
            await known.wait_read(3)
            await known.wait_for("sum(splitserve_executor_streams)", 1)
            await stranger.wait_for("count(count_over_time(up[1h]) >= 2)", 3)
            num_read = await stranger.value("sum(max_over_time(up[1h]))")
    finally:
        running.kill_all()

    assert num_read == 0
