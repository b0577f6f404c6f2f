"""The chat template of the bundled model: what it was trained on stays, and tools take part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve_client import ChatTemplateFailed, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from bundled_model.chat_tokenizer import CHAT_TEMPLATE, encode_document  # noqa: E402
from bundled_model.conversation import Role, Turn  # noqa: E402
from tokenizers import Tokenizer as RawTokenizer  # noqa: E402

BUNDLED = ROOT / "executor_service" / "bundled_model"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
USER = {"role": "user", "content": " Tell me a story. "}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files({name: (BUNDLED / name).read_bytes() for name in FILES})


def test_the_template_is_that_of_the_recipe() -> None:
    assert (BUNDLED / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_chat_is_written_as_in_training(tokenizer: Tokenizer) -> None:
    turns: list[tuple[Role, str]] = [
        ("system", "Be kind."),
        ("user", "Tell me a story."),
        ("assistant", "Once."),
    ]
    document = tuple(Turn(role, content) for role, content in turns)
    trained = encode_document(RawTokenizer.from_file(str(BUNDLED / FILES[0])), document)

    messages = [{"role": role, "content": content} for role, content in turns]
    rendered = tokenizer.encode_chat(messages, add_generation_prompt=False)

    assert tuple(rendered) == trained.token_ids


@pytest.mark.parametrize("content", [None, "", "I look."])
@pytest.mark.parametrize("arguments", ['{"what": "fox"}', {"what": "fox"}])
def test_a_loop_of_tools_is_written_when_a_client_sends_it_back(
    content: str | None, arguments: object, tokenizer: Tokenizer
) -> None:
    function = {"name": "find", "arguments": arguments}
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": function}
    chat: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a red fox"},
    ]

    assert tokenizer.render_chat(chat, tools=TOOLS) == (
        "<|begin|><|user|>Tell me a story.<|end|>"
        f"<|assistant|>{content or ''}"
        '<tool_call>{"name": "find", "arguments": {"what": "fox"}}</tool_call><|end|>'
        "<|user|><tool_response>a red fox</tool_response><|end|><|assistant|>"
    )


def test_other_roles_are_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateFailed, match="role critic; allowed: system, user, assistant"):
        tokenizer.render_chat([{"role": "critic", "content": "x"}])
