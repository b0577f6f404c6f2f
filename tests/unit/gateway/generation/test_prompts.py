"""Prompts: refusal of long texts, work in threads, and tenants of requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine

import pytest

from splitserve_client import Model, Tokenizer
from splitserve_gateway.callers import ANYBODY, Caller
from splitserve_gateway.config import GatewayConfig
from splitserve_gateway.generation import Serving, encode_chat, encode_prompts
from splitserve_gateway.generation import prompts as chat_prompts
from splitserve_gateway.grammars import GrammarChecker
from splitserve_gateway.http import ApiError
from splitserve_gateway.schemas import ChatFields, ChatMessage, CompletionRequest
from splitserve_gateway.upstreams import ServedByScheduler
from tests.support.models import tiny_tokenizers

MAX_MODEL_LEN = 512
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class CountingTokenizer(Tokenizer):
    """Notes how long the texts are that it encodes."""

    lengths: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    library = tiny_tokenizers.byte_level()
    library.add_tokens(["wide" * 32])
    made = CountingTokenizer.from_files(
        {
            "tokenizer.json": library.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
        }
    )
    made.lengths = []
    return made


def served(tokenizer: Tokenizer) -> ServedByScheduler:
    return ServedByScheduler(Model("m", "d", "float32", 500, MAX_MODEL_LEN, ()), tokenizer)


@pytest.mark.parametrize("is_chat", [True, False])
async def test_text_is_refused_when_its_beginning_is_too_long(
    tokenizer: CountingTokenizer, is_chat: bool
) -> None:
    text = "the fox " * 10_000
    message = ChatMessage(role="user", content=text)
    encoding: Coroutine[None, None, object] = (
        encode_chat(ChatFields(messages=[message]), served(tokenizer))
        if is_chat
        else encode_prompts(CompletionRequest(prompt=text), served(tokenizer))
    )
    with pytest.raises(ApiError) as raised:
        await encoding

    assert tokenizer.lengths == [8 * MAX_MODEL_LEN]
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == ("messages" if is_chat else "prompt")
    assert "80000 characters" in raised.value.message
    assert "context length is 512 tokens" in raised.value.message


@pytest.mark.parametrize(
    ("text", "truncate"),
    [("wide" * 32 * 500, None), ("the fox " * 100, None), ("the fox " * 10_000, 100)],
    ids=["long tokens", "short", "truncated"],
)
async def test_text_is_encoded_as_a_whole_when_it_may_fit(
    tokenizer: CountingTokenizer, text: str, truncate: int | None
) -> None:
    expected = tokenizer.encode(text)
    body = CompletionRequest(prompt=text, truncate_prompt_tokens=truncate)
    (prompt,) = await encode_prompts(body, served(tokenizer))

    assert prompt.token_ids == (expected if truncate is None else expected[-truncate:])


async def test_small_text_is_encoded_while_large_ones_wait(
    tokenizer: Tokenizer,
) -> None:
    is_released = threading.Event()
    begun: list[None] = []

    def work() -> None:
        begun.append(None)
        is_released.wait()

    large = [asyncio.create_task(tokenizer.in_thread(work, 2**20)) for _ in range(5)]
    assert await tokenizer.in_thread(lambda: "small", 2000) == "small"
    assert len(begun) <= 1
    is_released.set()
    await asyncio.gather(*large)
    assert len(begun) == 5


async def test_messages_are_converted_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def noted(convert: Callable[[ChatMessage], object]) -> Callable[[ChatMessage], object]:
        def note(message: ChatMessage) -> object:
            threads.add(threading.get_ident())
            return convert(message)

        return note

    monkeypatch.setattr(chat_prompts, "_message", noted(chat_prompts._message))
    messages = [ChatMessage(role="user", content="a")] * 3
    await encode_chat(ChatFields(messages=messages), served(tokenizer))

    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("caller", "user", "tenant"),
    [
        (ANYBODY, "u", "u"),
        (ANYBODY, None, ""),
        (Caller("key", tenant="a"), "u", "a"),
        (Caller("key", tenant="a"), None, "a"),
        # May speak for tenants.
        (Caller("key"), "u", "u"),
    ],
)
async def test_tenant_is_the_callers_unless_it_may_speak_for_others(
    caller: Caller, user: str | None, tenant: str
) -> None:
    serving = Serving(None, None, GatewayConfig(), GrammarChecker(), caller)  # type: ignore[arg-type]
    assert serving.checker_for(user).tenant == tenant


def test_callers_and_what_they_bring_are_not_shown() -> None:
    assert "secret" not in repr(Caller("secret", tenant="a"))
