"""A real Prometheus that reads processes of a test: `prometheus`."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
OBSERVABILITY = ROOT / "deploy" / "observability"
# Between two looks at something that another process does.
LOOK_S = 0.1
_INTERVAL = "500ms"

needs_prometheus = pytest.mark.skipif(
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

    async def wait_read(self, num_targets: int) -> None:
        """Until so many processes have been read twice, which is what a rate is of."""
        await self.wait_for("count(count_over_time(up[1h]) >= 2 and up == 1)", num_targets)

    async def firing(self) -> set[str]:
        """Alerts that fire now."""
        data = await self.get("alerts")
        alerts = data["alerts"] if data else []
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@asynccontextmanager
async def prometheus(
    folder: Path,
    jobs: Mapping[str, list[str]],
    rules: Path = OBSERVABILITY / "alerts.yml",
    tls: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> AsyncIterator[Prometheus]:
    """One that reads the addresses of `jobs`, often. `tls`: `tls_config` of jobs with TLS."""
    intervals = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    configuration = {
        "global": dict.fromkeys(intervals, _INTERVAL),
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [{"targets": targets}],
                **({"scheme": "https", "tls_config": dict(tls[name])} if name in tls else {}),
            }
            for name, targets in jobs.items()
        ],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration))
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


def quick_rules(folder: Path, **replaced: str) -> Path:
    """A copy of our rules that do not wait; `replaced`: other expressions, by alert."""
    text = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())
    for rule in text["groups"][0]["rules"]:
        rule.pop("for", None)
        rule["expr"] = replaced.get(rule["alert"], rule["expr"])
    copy = folder / "alerts.yml"
    copy.write_text(yaml.safe_dump(text))
    return copy
