"""Loading of adapters: `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from splitserve_client import (
    AdapterExists,
    AdapterUnknown,
    AsyncClient,
    ClientConfig,
    SplitserveError,
)
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import with_notes
from splitserve_gateway.http import ApiError, caller_not_allowed, invalid, no_scheduler, quoted
from splitserve_gateway.schemas import LoadAdapterRequest, UnloadAdapterRequest

T = TypeVar("T")

router = APIRouter()


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(request: Request) -> Response:
    """Registers an adapter with all schedulers; for operators."""
    gateway = gateway_of(request)
    async with gateway.reading(request, LoadAdapterRequest) as body:
        await _ask_all(gateway, lambda operators: _load(operators, body))
        text = f"Success: LoRA adapter {body.lora_name!r} is loaded."
        return with_notes(PlainTextResponse(text), body)


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(request: Request) -> Response:
    """Removes an adapter from all schedulers that have it; for operators."""
    gateway = gateway_of(request)
    async with gateway.reading(request, UnloadAdapterRequest) as body:
        answers = await _ask_all(gateway, lambda operators: _unload(operators, body.lora_name))
        if not any(answers):
            message = f"no adapter is called {quoted(body.lora_name)!r}"
            kind, code = "invalid_request_error", "model_not_found"
            raise ApiError(404, kind, message, code=code, param="lora_name")
        text = f"Success: LoRA adapter {body.lora_name!r} is removed."
        return with_notes(PlainTextResponse(text), body)


async def _load(operators: AsyncClient, body: LoadAdapterRequest) -> None:
    """Registers an adapter. Raises ApiError if its name has another folder."""
    try:
        await operators.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
    except AdapterExists as error:
        raise invalid(error.message, "lora_name", "adapter_exists") from error


async def _unload(operators: AsyncClient, name: str) -> bool:
    """Removes an adapter. Returns whether the scheduler had it."""
    try:
        await operators.unload_adapter(name)
    except AdapterUnknown:
        return False
    return True


async def _ask_all(gateway: Gateway, question: Callable[[AsyncClient], Awaitable[T]]) -> list[T]:
    """Asks all schedulers, one after the other, with the caller's credential.

    Returns their answers, at least one. Raises ApiError, and the first error of a scheduler.
    """
    if not (gateway.caller.may_operate or gateway.config.allow_adapter_loading):
        raise caller_not_allowed(
            "this gateway loads no adapters; --allow-adapter-loading allows it"
        )
    if len({model.digest for model in gateway.fleet.models()}) > 1:
        message = (
            "the schedulers serve several models; allowed: `splitserve adapters` at one of them"
        )
        raise invalid(message, code="several_models")
    try:
        addresses = await gateway.operators.addresses()
    except OSError as error:
        raise no_scheduler() from error
    config = ClientConfig(
        tls=gateway.config.scheduler_tls,
        api_key=gateway.caller.credential or None,
        follows_peers=False,
    )
    answers = []
    for address in sorted(addresses):
        try:
            async with AsyncClient(address, config) as operators:
                answers.append(await question(operators))
        except SplitserveError as error:
            if error.reason == "METHOD_UNKNOWN":
                raise _unavailable() from error
            raise
        finally:
            gateway.fleet.forget_adapters()
    if not answers:
        raise no_scheduler()
    return answers


def _unavailable() -> ApiError:
    message = "schedulers answer operators at another address; --live-schedulers names it"
    kind, code = "service_unavailable_error", "adapter_loading_unavailable"
    return ApiError(503, kind, message, code=code)
