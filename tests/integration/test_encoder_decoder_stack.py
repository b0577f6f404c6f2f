"""Encoder-decoder models in real processes: answers of clients equal those of `generate`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch

from splitserve_client import AsyncClient, InvalidRequest, SamplingParams, Tokens
from splitserve_gateway.config import GatewayConfig
from tests.support.models import tiny_tokenizers
from tests.support.models.model_pair import load_reference
from tests.support.models.tiny_models import edit_json, make_tiny_model
from tests.support.processes.gate import GATE, GATED_EXECUTOR, GATED_SCHEDULER, Gate
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import Processes

VOCAB_SIZE = 160
ENCODER = [5, 17, 42, 9, 71, 23, 8, 30, 11]
START, LANGUAGE, EOS = 2, 12, 1
# The gate holds sequences of more than HELD_AT tokens.
NUM_SHORT, HELD_AT, NUM_LONG = 12, 10, 60


class EncodedProcesses(Processes):
    """A scheduler and executors of a tiny BART, which takes at most 96 encoder tokens."""

    executor_module = GATED_EXECUTOR

    def start_executor(self, *options: str, address: str = "") -> str:
        return super().start_executor(
            "--dtype", "float32", "--threads", "1", *options, address=address
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes, and what they must answer."""

    processes: EncodedProcesses
    gate: Gate
    reference: Any

    def expected(self, encoder: list[int], decoder: list[int], num_tokens: int) -> list[int]:
        """Returns the tokens of `generate`."""
        tokens = self.reference.generate(
            torch.tensor([encoder]),
            attention_mask=torch.ones(1, len(encoder), dtype=torch.long),
            decoder_input_ids=torch.tensor([decoder]),
            decoder_start_token_id=decoder[0],
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            forced_bos_token_id=None,
            forced_eos_token_id=None,
        )
        found: list[int] = tokens[0, len(decoder) :].tolist()
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    model = make_tiny_model("bart", directory / "model", overrides={"vocab_size": VOCAB_SIZE})
    reference = load_reference(model)
    tiny_tokenizers.words(VOCAB_SIZE).save(str(model / "tokenizer.json"))
    edit_json(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit_json(
        model / "generation_config.json",
        decoder_start_token_id=START,
        forced_bos_token_id=LANGUAGE,
        eos_token_id=EOS,
    )
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(directory / "gate")
        patch.setenv(GATE, str(gate.path))
        running = EncodedProcesses(model)
        try:
            running.start_scheduler(*GATED_SCHEDULER)
            running.start_executor()
            yield Stack(running, gate, reference)
        finally:
            running.kill_all()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    """Client of one executor that nobody holds."""
    stack.gate.release()
    await stack.processes.run_executors(1)
    async with AsyncClient(stack.processes.address, PATIENT) as opened:
        yield opened


@pytest.fixture
async def http(stack: Stack, client: AsyncClient) -> AsyncIterator[httpx2.AsyncClient]:
    """Client of a gateway."""
    config = GatewayConfig(schedulers=stack.processes.address)
    async with (
        serving(config) as gateway,
        httpx2.AsyncClient(base_url=url_of(gateway), trust_env=False, timeout=PATIENCE_S) as opened,
    ):
        yield opened


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


async def test_model_tells_what_its_encoder_and_decoder_take(client: AsyncClient) -> None:
    encoder = (await client.get_model()).encoder
    assert encoder is not None
    assert encoder.max_tokens == 96
    assert encoder.decoder_token_ids == (START, LANGUAGE)


async def test_stream_goes_on_when_its_executor_is_killed(
    stack: Stack, client: AsyncClient
) -> None:
    stack.gate.hold(HELD_AT)
    found: list[int] = []
    stream = client.generate([START, LANGUAGE], params(NUM_LONG), encoder_token_ids=ENCODER)
    async with aclosing(stream) as events:
        async for event in events:
            is_first = not found
            found += event.token_ids if isinstance(event, Tokens) else ()
            if is_first:
                [executor] = (await client.list_executors()).executors
                stack.processes.kill_executor(executor.address)
                stack.gate.release()
                stack.processes.start_executor()
    assert found == stack.expected(ENCODER, [START, LANGUAGE], NUM_LONG)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ([], "encoder_token_ids is empty; allowed: 1 or more tokens"),
        ([7] * 97, "encoder_token_ids has 97 tokens; allowed: at most 96"),
        ([7, VOCAB_SIZE], f"token id is {VOCAB_SIZE}"),
    ],
)
async def test_encoder_tokens_are_refused_by_name(
    client: AsyncClient, encoder: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await client.complete([START], params(2), encoder_token_ids=encoder)


@pytest.mark.parametrize(
    ("fields", "decoder"),
    [
        ({}, [START, LANGUAGE]),
        ({"decoder_prompt": [START, 30]}, [START, 30]),
        ({"decoder_prompt": "t40"}, [START, 40]),
    ],
)
async def test_completion_reads_its_prompt_with_the_encoder(
    stack: Stack, http: httpx2.AsyncClient, fields: dict[str, object], decoder: list[int]
) -> None:
    prompt = " ".join(f"t{token_id}" for token_id in ENCODER)
    body = {
        "prompt": prompt,
        "max_tokens": NUM_SHORT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    expected = stack.expected(ENCODER, decoder, NUM_SHORT)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(ENCODER) + len(decoder)


async def test_texts_are_read_with_the_encoder(stack: Stack, client: AsyncClient) -> None:
    text = " ".join(f"t{token_id}" for token_id in ENCODER)
    expected = tuple(stack.expected(ENCODER, [START, LANGUAGE], NUM_SHORT))
    generation = await client.complete_text(text, params(NUM_SHORT))
    assert generation.completions[0].token_ids == expected
    results = [each async for each in client.map([text, text], params(NUM_SHORT))]
    assert [each.text for each in results] == [generation.text] * 2
    command = [
        *("generate", "--address", stack.processes.address, "--max-tokens", str(NUM_SHORT)),
        *("--temperature", "0", "--ignore-eos", "--json", text),
    ]
    program = [sys.executable, "-m", "splitserve_cli", *command]
    done = await asyncio.to_thread(subprocess.run, program, check=True, capture_output=True)
    assert tuple(json.loads(done.stdout)["token_ids"]) == expected


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [7] * 97}, "prompt"),
        ("/v1/completions", {"prompt": "t7", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "t7"}]}, "messages"),
    ],
)
async def test_request_is_refused_by_field(
    http: httpx2.AsyncClient, path: str, fields: dict[str, object], param: str
) -> None:
    response = await http.post(path, json={"max_tokens": 2, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
