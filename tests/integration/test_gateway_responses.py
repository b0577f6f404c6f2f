"""The Responses API, by the official client, before fake executors whose tokens are known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fakes.fake_generation import expected_tokens
from tests.support.processes.gateway import RunningGateway, running_gateway, text_executor

SEED = 7


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(text_executor(tmp_path)) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as opened:
        yield opened
