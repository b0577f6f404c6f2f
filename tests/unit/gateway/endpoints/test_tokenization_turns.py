"""Turns at the tokenizer's threads are not held while a model is awaited."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import httpx2
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from splitserve_client import Model
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.endpoints import Gateway, router
from splitserve_gateway.http import ApiError, BodyBudget, model_unknown
from splitserve_gateway.sharing import FairSemaphore
from tests.support.processes.patience import PATIENCE_S


class MovingFleet:
    """The executors of one model are on their way."""

    def __init__(self) -> None:
        self.is_waited_for = asyncio.Event()
        self.has_come = asyncio.Event()

    async def wait_read(self, model: str, _: object) -> None:
        if model == "moving":
            self.is_waited_for.set()
            await self.has_come.wait()

    def models(self, _: object) -> list[Model]:
        return []

    def choose(self, model: str, *_: object, **__: object) -> NoReturn:
        raise model_unknown(model, [])


async def refuse(_: Request, error: ApiError) -> Response:
    return error.response()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x" * 10**5}), ("/detokenize", {"tokens": [1] * 10**5})],
)
async def test_turn_is_left_when_model_is_awaited(path: str, body: dict[str, Any]) -> None:
    fleet: Any = MovingFleet()
    config = GatewayConfig(max_body_bytes=2**20)
    unused: Any = None
    app = FastAPI(exception_handlers={ApiError: refuse})
    app.include_router(router)
    app.state.gateway = Gateway(
        config, fleet, unused, unused, BodyBudget(2**24), FairSemaphore(1, 8), unused, unused
    )
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://localhost"
    ) as http:
        waiting = asyncio.create_task(http.post(path, json={"model": "moving", **body}))
        await fleet.is_waited_for.wait()
        async with asyncio.timeout(PATIENCE_S):
            other = await http.post(path, json={"model": "other", **body})
        assert (other.status_code, waiting.done()) == (404, False)
        fleet.has_come.set()
        assert (await waiting).status_code == 404
