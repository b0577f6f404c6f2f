"""A real collector of traces, which can be asked for them: Phoenix, in a venv of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.observability.prometheus import LOOK_S
from tests.support.processes.addresses import reserve_address
from tests.support.processes.forked import ROOT
from tests.support.processes.patience import PATIENCE_S

_FOLDER = ROOT / ".tools" / "phoenix"
_PROJECT = "splitserve"
# What processes are told of themselves (OTEL_RESOURCE_ATTRIBUTES), so that their traces are found.
RESOURCE_ATTRIBUTES = f"openinference.project.name={_PROJECT}"
_ERROR = 2

needs_phoenix = pytest.mark.skipif(
    not (_FOLDER / ".ready").exists(),
    reason="it is not installed: bash tests/observability/install_phoenix .tools/phoenix",
)


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """A span as it was kept: times to the microsecond. `events`: names and times."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    error: str | None

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]


@dataclass(frozen=True, slots=True)
class Phoenix:
    """One that runs. `url`: where it takes traces."""

    url: str
    http: httpx2.AsyncClient

    async def spans_when(self, holds: Callable[[Sequence[StoredSpan]], bool]) -> list[StoredSpan]:
        """All that it has, as soon as `holds` of them, in the order of their beginnings."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds(spans := await self._spans()):  # noqa: ASYNC110  (another process)
                await asyncio.sleep(LOOK_S)
            return spans

    async def wait_ready(self) -> None:
        """Until it answers."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._answers():  # noqa: ASYNC110  (another process)
                await asyncio.sleep(LOOK_S)

    async def _answers(self) -> bool:
        try:
            return (await self.http.get("/healthz")).is_success
        except httpx2.TransportError:
            return False

    async def _spans(self) -> list[StoredSpan]:
        path = f"/v1/projects/{_PROJECT}/spans/otlpv1"
        answer = await self.http.get(path, params={"limit": 1000})
        if answer.status_code == httpx2.codes.NOT_FOUND:
            return []  # nothing has come
        found = [_span_of(each) for each in answer.raise_for_status().json()["data"]]
        return sorted(found, key=lambda span: span.start_ns)


def _span_of(found: Mapping[str, Any]) -> StoredSpan:
    status = found["status"]
    return StoredSpan(
        found["name"],
        found["trace_id"],
        found["span_id"],
        found["parent_span_id"] or "",
        found["start_time_unix_nano"],
        found["end_time_unix_nano"],
        {each["key"]: _value_of(each["value"]) for each in found["attributes"]},
        [(event["name"], event["time_unix_nano"]) for event in found["events"] or ()],
        (status["message"] or "") if status["code"] == _ERROR else None,
    )


def _value_of(value: Mapping[str, object]) -> object:
    return next((each for each in value.values() if each is not None), "")


@asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[Phoenix]:
    """One that keeps its data in `folder`, and tells nobody beyond this machine."""
    host, _, port = reserve_address().rpartition(":")
    _, _, grpc_port = reserve_address().rpartition(":")
    settings = {
        "WORKING_DIR": str(folder),
        "HOST": host,
        "PORT": port,
        "GRPC_PORT": grpc_port,
        "TELEMETRY_ENABLED": "false",
        "ALLOW_EXTERNAL_RESOURCES": "false",
        "DISABLE_AGENT_ASSISTANT": "true",
    }
    with (folder / "phoenix.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(_FOLDER / "bin" / "phoenix", "serve"),
            stdout=log,
            stderr=log,
            env=os.environ | {f"PHOENIX_{name}": value for name, value in settings.items()},
        )
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://{host}:{port}", timeout=PATIENCE_S, trust_env=False
        ) as http:
            started = Phoenix(f"http://{host}:{grpc_port}", http)
            await started.wait_ready()
            yield started
    finally:
        process.kill()
        await process.wait()
