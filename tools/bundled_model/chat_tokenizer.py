"""Train the byte-level BPE tokenizer and render documents the way the chat template does."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bundled_model.conversation import Document

BEGIN_TOKEN: Final = "<|begin|>"
END_TOKEN: Final = "<|end|>"
PAD_TOKEN: Final = "<|pad|>"
ROLES: Final[tuple[str, ...]] = ("system", "user", "assistant")

CHAT_TEMPLATE: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('role ' + message.role + '; allowed: system, user, assistant, tool') }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>' + (message['content'] or '') | trim + '</tool_response>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>{"name": ' + call['function']['name'] | tojson }}
        {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """Token ids, and for each of them whether the model is trained to predict it."""

    token_ids: tuple[int, ...]
    is_target: tuple[bool, ...]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `vocab_size` tokens; any text round-trips.

    It adds no special token by itself: the chat template writes them out.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, BEGIN_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_num_tokens: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN_TOKEN,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_num_tokens,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def special_token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of `token`; raises `KeyError` if the vocabulary lacks it."""
    token_id: int | None = tokenizer.token_to_id(token)
    if token_id is None:
        raise KeyError(token)
    return token_id


def encode_document(
    tokenizer: Tokenizer, document: Document, *, has_begin_token: bool = True
) -> EncodedDocument:
    """Return the ids of `document`; targets are answers and plain stories with their end token."""
    token_ids = [special_token_id(tokenizer, BEGIN_TOKEN)] if has_begin_token else []
    is_target = [False] * len(token_ids)
    for turn in document:
        if turn.role != "text":
            token_ids.append(special_token_id(tokenizer, f"<|{turn.role}|>"))
            is_target.append(False)
        content = [*tokenizer.encode(turn.content).ids, special_token_id(tokenizer, END_TOKEN)]
        token_ids += content
        is_target += [turn.role in ("assistant", "text")] * len(content)
    return EncodedDocument(tuple(token_ids), tuple(is_target))
