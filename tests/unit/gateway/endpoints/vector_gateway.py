"""A gateway before fake schedulers of models that return vectors, and one that returns text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from tokenizers import processors

from splitserve.scheduler.v1 import scheduler_pb2 as api
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.upstreams import Fleet
from tests.support.fakes.fake_scheduler import FakeScheduler, start, vector_of
from tests.support.models import tiny_tokenizers
from tests.support.processes.gateway import serving, until, url_of
from tests.support.processes.patience import PATIENCE_S

NUM_WORDS = 900
CLS, SEP = NUM_WORDS, NUM_WORDS + 1
PROMPTS = {"query": "t1 t1 ", "document": "t2 ", "title": "t3 ", "blank": ""}
KINDS = {
    "embedder": api.PoolingInfo(embedding_size=8),
    "ranker": api.PoolingInfo(labels=["LABEL_0"]),
    "classifier": api.PoolingInfo(labels=["bad", "good", "odd"]),
    "both": api.PoolingInfo(embedding_size=4, labels=["no", "yes"]),
    "bare": api.PoolingInfo(embedding_size=4),
    "writer": None,
}
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def tokenizer_files() -> dict[str, bytes]:
    """Files of a tokenizer in which `tN` is token N, with the template of BERT, and prompts."""
    tokenizer = tiny_tokenizers.words(NUM_WORDS)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    prompts = {"prompts": PROMPTS, "default_prompt_name": "title"}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "config_sentence_transformers.json": json.dumps(prompts).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


@dataclass(frozen=True, slots=True)
class VectorGateway:
    """Running gateway. `fakes`: schedulers by the names of their models."""

    url: str
    http: httpx2.AsyncClient
    fleet: Fleet
    fakes: dict[str, FakeScheduler]

    async def post(self, path: str, model: str, **body: object) -> dict[str, Any]:
        """The answer to `body`, which must be a 200."""
        response = await self.http.post(path, json={"model": model, **body})
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    async def refusal(self, path: str, model: str, **body: object) -> dict[str, Any]:
        """The error object of the answer to `body`, which must be a 400."""
        response = await self.http.post(path, json={"model": model, **body})
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    def prompts(self, model: str) -> list[list[int]]:
        """Prompts that the scheduler of `model` got since the last call."""
        requests = self.fakes[model].requests
        prompts = [list(request.prompt_token_ids) for request in requests]
        requests.clear()
        return prompts


def vector(model: str, token_ids: Sequence[int], **pooling: Any) -> list[float]:  # noqa: ANN401
    """The vector of a model; `pooling`: fields of the message."""
    info = KINDS[model]
    assert info is not None
    return vector_of(token_ids, api.PoolingParams(**pooling), info)


def ids(*words: int) -> list[int]:
    """Tokens of a text of these words."""
    return [CLS, *words, SEP]


def text(*words: int) -> str:
    return " ".join(f"t{word}" for word in words)


@asynccontextmanager
async def vector_gateway(**config: Any) -> AsyncIterator[VectorGateway]:  # noqa: ANN401
    """Runs a gateway before a scheduler of each kind."""
    async with AsyncExitStack() as stack:
        fakes, addresses = {}, []
        for name, pooling in KINDS.items():
            files = {} if name == "bare" else tokenizer_files()
            fake = FakeScheduler(
                tokenizer_files=files, name=name, model_digest=name, pooling=pooling
            )
            scheduler = await start(fake)
            stack.push_async_callback(scheduler.server.stop, None)
            fakes[name] = fake
            addresses.append(f"127.0.0.1:{scheduler.port}")
        made = GatewayConfig(schedulers=",".join(addresses), **config)
        server = await stack.enter_async_context(serving(made))
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=url_of(server), timeout=PATIENCE_S, trust_env=False)
        )
        await until(lambda: hasattr(server.app.state, "gateway"))
        fleet = server.app.state.gateway.fleet
        await until(lambda: len(fleet.models()) == len(KINDS) and fleet.is_ready)
        yield VectorGateway(url_of(server), http, fleet, fakes)
