"""The processes of `docker-compose.tls.yml`, without the containers around them."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.support.processes.addresses import reserve_address
from tests.support.processes.patience import PATIENCE_S
from tests.support.processes.processes import wait_ready
from tests.support.security.cluster import ROOT, compose_environment, run_compose_setup
from tests.support.security.credentials import bearer

ADDRESSES = ("SPLITSERVE_CLUSTER_LISTEN", "SPLITSERVE_LISTEN", "SPLITSERVE_HTTP")
BODY = {"model": "", "prompt": "Once", "max_tokens": 4}


@dataclass(frozen=True, slots=True)
class Composed:
    """`folder`: what `setup` made. `environs`: of each service. `http`, `live`: ports."""

    folder: Path
    environs: dict[str, dict[str, str]]
    http: str
    live: str

    def run(
        self, service: str, *arguments: str, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """A command as that service; `changes`: of its variables."""
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env=self.environs[service] | changes,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def add_key(self, tenant: str) -> str:
        """A new key, which the scheduler takes by itself."""
        file = str(self.folder / "scheduler" / "keys.json")
        flag = f"--tenant={tenant}"
        added = self.run("operator", "splitserve_cli", "keys", "add", file, flag)
        return added.stdout.strip()

    def key_of(self, service: str) -> str:
        """Which `setup` made for it."""
        return (self.folder / service / "api.key").read_text().strip()

    def client(self, key: str | None, port: str | None = None) -> httpx2.AsyncClient:
        """Of the gateway's API, or of `port`; it believes the authority alone."""
        context = ssl.create_default_context(cafile=self.folder / "operator" / "ca.crt")
        return httpx2.AsyncClient(
            base_url=f"https://localhost:{port or self.http}",
            verify=context,
            headers=dict(bearer(key)),
        )

    async def num_executors(self) -> int:
        told = self.run("operator", "splitserve_cli", "info", "--json")
        return len(json.loads(told.stdout)["executors"]) if told.returncode == 0 else 0


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    folder = tmp_path_factory.mktemp("splitserve")
    run_compose_setup(folder)
    clients, cluster, executor, http, live = (
        reserve_address().rpartition(":")[2] for _ in range(5)
    )
    ours = {
        "scheduler": {"LISTEN": f"0.0.0.0:{clients}", "CLUSTER_LISTEN": f"0.0.0.0:{cluster}"},
        "executor": {
            "LISTEN": f"0.0.0.0:{executor}",
            "SCHEDULER": f"127.0.0.1:{cluster}",
            "NUM_DEVICE_BLOCKS": "64",
            "NUM_HOST_BLOCKS": "0",
        },
        "gateway": {
            "HTTP": f"0.0.0.0:{http}",
            "SCHEDULERS": f"127.0.0.1:{clients}",
            "LIVE_LISTEN": f"0.0.0.0:{live}",
            "LIVE_SCHEDULERS": f"127.0.0.1:{cluster}",
        },
        "operator": {
            "ADDRESS": f"127.0.0.1:{clients}",
            "CLUSTER_ADDRESS": f"127.0.0.1:{cluster}",
        },
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPLITSERVE_")}
    inherited |= {"OMP_NUM_THREADS": "1"}
    environs = {
        service: inherited
        | compose_environment(service, folder)
        | {f"SPLITSERVE_{name}": value for name, value in values.items()}
        for service, values in ours.items()
    }
    with ExitStack() as stack:
        for service in ("scheduler", "executor", "gateway"):
            process = subprocess.Popen(
                [sys.executable, "-m", "splitserve_cli", service, "--log-level=error"],
                env=environs[service],
                cwd=ROOT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield Composed(folder, environs, http, live)


@asynccontextmanager
async def serving(composed: Composed, key: str | None) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the gateway, once that serves."""
    async with composed.client(key) as client:
        await wait_ready(client)
        yield client


async def test_caller_with_a_key_is_answered_and_nobody_else(composed: Composed) -> None:
    async with serving(composed, composed.add_key("alice")) as client:
        models = await client.get("/v1/models")
        body = BODY | {"model": models.json()["data"][0]["id"]}
        answer = await client.post("/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    async with serving(composed, None) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 401


async def test_live_page_shows_the_scheduler_to_operators_alone(composed: Composed) -> None:
    async with serving(composed, None):
        async with composed.client(composed.key_of("operator"), composed.live) as client:
            assert "splitserve" in (await client.get("/")).text
            async with client.stream("GET", "/feed") as answer:
                assert answer.status_code == 200
                frame = json.loads(await anext(answer.aiter_lines()))
        assert [executor["state"] for executor in frame["executors"]] == ["serving"]
        for key in (None, composed.key_of("gateway")):
            async with composed.client(key, composed.live) as client:
                assert (await client.get("/feed")).status_code in (401, 403)


async def test_operator_is_told_of_executors(composed: Composed) -> None:
    async with serving(composed, None):
        assert await composed.num_executors() == 1
    # A gateway is none.
    flags = [
        f"--cluster-address={composed.environs['operator']['SPLITSERVE_CLUSTER_ADDRESS']}",
        f"--address={composed.environs['operator']['SPLITSERVE_ADDRESS']}",
    ]
    own = f"--api-key-file={composed.environs['gateway']['SPLITSERVE_GATEWAY_KEY_FILE']}"
    refused = composed.run("gateway", "splitserve_cli", "info", own, *flags)
    assert (refused.returncode, "[CALLER_NOT_ALLOWED]" in refused.stderr) == (1, True)


@pytest.mark.parametrize("service", ["scheduler", "executor", "gateway"])
async def test_image_finds_its_service_well(composed: Composed, service: str) -> None:
    stage = (ROOT / "Dockerfile").read_text().split(f" AS {service}\n")[1].split("\nFROM")[0]
    found = re.search(r"HEALTHCHECK[^\n]*\\\n +CMD (\[.*\])", stage)
    assert found is not None
    program, module_flag, *command = json.loads(found[1])
    assert (program, module_flag) == ("python", "-m")
    async with serving(composed, None):
        well = composed.run(service, *command)
        assert (well.returncode, well.stderr) == (0, "")
    nowhere = {name: reserve_address() for name in ADDRESSES}
    assert composed.run(service, *command, **nowhere).returncode == 1
