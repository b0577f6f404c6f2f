"""Clients that leave cost nobody anything, and leave nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.processes.gateway import running_gateway, text_executor
from tests.support.processes.rude_clients import Leftovers, leave_often, wait_for_nothing


async def test_gateway_keeps_nothing_when_clients_leave_at_random_places(tmp_path: Path) -> None:
    async with running_gateway(text_executor(tmp_path)) as gateway:
        # Whatever is made once, for all requests, is there after the first ones.
        await leave_often(gateway.url.removeprefix("http://"), 20, 4, random.Random(1))
        await gateway.http.aclose()
        await gateway.service.wait_idle()
        before = Leftovers.now()
        await leave_often(gateway.url.removeprefix("http://"), 300, 32, random.Random(2))
        await wait_for_nothing(gateway.server, gateway.service, before)
