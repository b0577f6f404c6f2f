"""Adapters over HTTP: as models of requests and in lists, and loaded at run time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from splitserve_gateway.config import GatewayConfig
from tests.contract.stranger.process import poll
from tests.support.fakes.fake_scheduler import VOCAB_SIZE, FakeScheduler, start
from tests.support.fakes.running_schedulers import TEMPLATE
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S

FILES = {
    "tokenizer.json": tiny_tokenizers.words(VOCAB_SIZE).to_str().encode(),
    "chat_template.jinja": TEMPLATE.encode(),
}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
FORMAL = {"formal": "/adapters/formal"}


@dataclass(frozen=True, slots=True)
class Adapted:
    """A gateway, and the schedulers behind it."""

    http: httpx2.AsyncClient
    schedulers: Sequence[FakeScheduler]

    async def complete(self, model: str | None, path: str = "/v1/completions") -> dict[str, Any]:
        response = await self.http.post(path, json=body_of(path, model))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def refusal(self, path: str, body: object, status: int) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    @property
    def requested(self) -> list[list[str]]:
        """Adapters of the requests at each scheduler."""
        return [[each.adapter for each in fake.requests] for fake in self.schedulers]


def body_of(path: str, model: str | None) -> dict[str, object]:
    prompts: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": [3, 4], "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "t3"}], "max_tokens": 2},
        "/v1/responses": {"input": "t3", "max_output_tokens": 2},
        "/tokenize": {"prompt": "t3"},
        "/detokenize": {"tokens": [3]},
    }
    return {"model": model, **prompts[path]}


@asynccontextmanager
async def gateway_before(
    *schedulers: FakeScheduler, allow_adapter_loading: bool = False
) -> AsyncIterator[Adapted]:
    async with AsyncExitStack() as stack:
        servers = [await start(fake) for fake in schedulers]
        for server in servers:
            stack.push_async_callback(server.server.stop, None)
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        config = GatewayConfig(
            schedulers=addresses,
            operator_schedulers=addresses,
            allow_adapter_loading=allow_adapter_loading,
        )
        gateway = await stack.enter_async_context(serving(config))
        http = httpx2.AsyncClient(base_url=url_of(gateway), trust_env=False, timeout=PATIENCE_S)
        await stack.enter_async_context(http)

        async def are_served() -> tuple[bool, object]:
            listed = (await http.get("/v1/models")).json()["data"]
            return {fake.name for fake in schedulers} <= {model["id"] for model in listed}, listed

        await poll(are_served, PATIENCE_S)
        yield Adapted(http, schedulers)


def scheduler(name: str = "fake", **fields: Any) -> FakeScheduler:  # noqa: ANN401
    """A scheduler that refuses adapters it does not list, if nothing else is said."""
    return FakeScheduler(
        name=name,
        model_digest=name.encode().hex(),
        tokenizer_files=FILES,
        **{"adapter_refusal": "ADAPTER_UNKNOWN", **fields},
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_answer_has_the_name_of_the_adapter_when_the_request_names_one(path: str) -> None:
    async with gateway_before(scheduler(adapters=FORMAL)) as gateway:
        assert (await gateway.complete("formal", path))["model"] == "formal"
        assert (await gateway.complete("fake", path))["model"] == "fake"
        assert (await gateway.complete(None, path))["model"] == "fake"
        assert gateway.requested == [["formal", "", ""]]


async def test_streamed_events_have_the_name_of_the_adapter() -> None:
    async with gateway_before(scheduler(adapters=FORMAL)) as gateway:
        body = {**body_of("/v1/completions", "formal"), "stream": True}
        response = await gateway.http.post("/v1/completions", json=body)
        assert response.text.count('"model":"formal"') == 3


async def test_models_list_adapters_with_path_and_parent() -> None:
    adapters = {"team/formal": "/adapters/formal", "short": "/adapters/short"}
    async with gateway_before(scheduler(adapters=adapters)) as gateway:
        base, *listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert (base["id"], base["parent"], base["root"]) == ("fake", None, "fake")
        assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
            ("short", "/adapters/short", "fake"),
            ("team/formal", "/adapters/formal", "fake"),
        ]
        assert {each["owned_by"] for each in (base, *listed)} == {"splitserve"}
        one = (await gateway.http.get("/v1/models/team/formal")).json()
        assert one == listed[1]
        assert (await gateway.http.get("/v1/models/formal")).status_code == 404


@pytest.mark.parametrize("refusal", ["ADAPTER_UNKNOWN", "FEATURE_UNSUPPORTED"])
async def test_unknown_name_is_no_model_when_no_scheduler_has_it(refusal: str) -> None:
    async with gateway_before(scheduler(adapter_refusal=refusal)) as gateway:
        for is_streamed in (False, True):
            body = {**body_of("/v1/completions", "gpt-5"), "stream": is_streamed}
            error = await gateway.refusal("/v1/completions", body, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == "the model 'gpt-5' is not served; available: 'fake'"


async def test_unknown_name_is_refused_with_some_of_the_names_that_there_are() -> None:
    adapters = {f"a{number:02}": f"/a/{number}" for number in range(30)}
    async with gateway_before(scheduler(adapters=adapters)) as gateway:
        body = body_of("/v1/completions", "gpt-5")
        message = (await gateway.refusal("/v1/completions", body, 404))["message"]
        assert message.endswith(
            "available: 'fake', "
            + ", ".join(f"'a{number:02}'" for number in range(9))
            + " and 21 more"
        )


@pytest.mark.parametrize("name", ["a@0123", "a" * 129, " a"])
async def test_name_that_no_adapter_may_have_is_not_sent(name: str) -> None:
    async with gateway_before(scheduler(adapter_refusal="")) as gateway:
        await gateway.refusal("/v1/completions", body_of("/v1/completions", name), 404)
        assert gateway.requested == [[]]


async def test_adapter_is_served_when_it_is_in_no_list() -> None:
    async with gateway_before(scheduler(adapter_refusal="")) as gateway:
        assert (await gateway.complete("in-a-folder"))["model"] == "in-a-folder"
        assert gateway.requested == [["in-a-folder"]]


async def test_adapter_goes_to_the_scheduler_that_lists_it() -> None:
    first = scheduler("first", adapters={"a": "/a"})
    second = scheduler("second", adapters={"b": "/b"})
    async with gateway_before(first, second) as gateway:
        for name in ("b", "a", "b", "second"):
            assert (await gateway.complete(name))["model"] == name
        assert gateway.requested == [["a"], ["b", "b", ""]]
        # An adapter that is registered later is found.
        second.adapters["c"] = "/c"

        async def is_found() -> tuple[bool, object]:
            answer = await gateway.http.post(
                "/v1/completions", json=body_of("/v1/completions", "c")
            )
            return answer.status_code == 200, answer.text

        await poll(is_found, PATIENCE_S)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_texts_are_encoded_as_by_the_model_when_an_adapter_is_named(path: str) -> None:
    async with gateway_before(scheduler(adapters=FORMAL)) as gateway:
        answers = [
            (await gateway.http.post(path, json=body_of(path, model))).json()
            for model in ("formal", "fake")
        ]
        assert answers[0] == answers[1]
        error = await gateway.refusal(path, body_of(path, "gpt-5"), 404)
        assert error["message"].endswith("available: 'fake', 'formal'")


async def test_adapter_is_loaded_and_removed_at_all_schedulers() -> None:
    async with gateway_before(scheduler(), scheduler(), allow_adapter_loading=True) as gateway:
        body = {"lora_name": "formal", "lora_path": "/adapters/formal"}
        for _ in range(2):
            loaded = await gateway.http.post(LOAD, json=body)
            assert (loaded.status_code, loaded.headers["content-type"]) == (
                200,
                "text/plain; charset=utf-8",
            )
            assert loaded.text == "Success: LoRA adapter 'formal' is loaded."
        assert [fake.adapters for fake in gateway.schedulers] == [FORMAL, FORMAL]
        assert (await gateway.complete("formal"))["model"] == "formal"
        other = {**body, "lora_path": "/adapters/other"}
        assert (await gateway.refusal(LOAD, other, 400))["code"] == "adapter_exists"
        replaced = await gateway.http.post(LOAD, json={**other, "load_inplace": True})
        assert replaced.status_code == 200
        assert gateway.schedulers[1].adapters == {"formal": "/adapters/other"}
        del gateway.schedulers[1].adapters["formal"]
        removed = await gateway.http.post(UNLOAD, json={"lora_name": "formal", "lora_int_id": 1})
        assert (removed.status_code, removed.text) == (
            200,
            "Success: LoRA adapter 'formal' is removed.",
        )
        error = await gateway.refusal(UNLOAD, {"lora_name": "formal"}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "lora_name")
        await gateway.refusal("/v1/completions", body_of("/v1/completions", "formal"), 404)


async def test_folder_that_is_no_adapter_is_refused() -> None:
    async with gateway_before(scheduler(), allow_adapter_loading=True) as gateway:
        error = await gateway.refusal(LOAD, {"lora_name": "a", "lora_path": "folder"}, 400)
        assert (error["code"], error["message"]) == ("adapter_invalid", "folder is no folder")


async def test_nobody_loads_adapters_unless_that_is_allowed() -> None:
    async with gateway_before(scheduler(adapters=dict(FORMAL))) as gateway:
        error = await gateway.refusal(LOAD, {"lora_name": "a", "lora_path": "/a"}, 403)
        assert "--allow-adapter-loading" in error["message"]
        await gateway.refusal(UNLOAD, {"lora_name": "formal"}, 403)
        assert gateway.schedulers[0].adapters == FORMAL


async def test_adapters_are_not_loaded_when_schedulers_have_several_models() -> None:
    async with gateway_before(
        scheduler("first"), scheduler("second"), allow_adapter_loading=True
    ) as gateway:
        error = await gateway.refusal(LOAD, {"lora_name": "a", "lora_path": "/a"}, 400)
        assert error["code"] == "several_models"
