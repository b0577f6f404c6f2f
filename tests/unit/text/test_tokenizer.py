from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
import tokenizers

from splitserve_client import (
    ChatTemplateFailed,
    InvalidRequest,
    Tokenizer,
    TokenizerUnavailable,
)
from tests.support.models import tiny_tokenizers

MESSAGES = [{"role": "user", "content": "<hi> & bye"}]


def make_tokenizer(template: str = "", **config: object) -> Tokenizer:
    files = {
        "tokenizer.json": tiny_tokenizers.byte_level().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if template:
        files["chat_template.jinja"] = template.encode()
    return Tokenizer.from_files(files)


def test_tokenizer_is_refused_when_file_missing_or_broken() -> None:
    with pytest.raises(TokenizerUnavailable, match=r"no tokenizer\.json"):
        Tokenizer.from_files({})
    with pytest.raises(TokenizerUnavailable, match="not readable"):
        Tokenizer.from_files({"tokenizer.json": b"{"})


def test_render_chat_takes_special_tokens_as_objects_or_texts() -> None:
    tokenizer = make_tokenizer(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
    )

    assert tokenizer.render_chat(MESSAGES) == "<s><hi> & bye</s>"


def test_encode_chat_adds_nothing_when_the_template_writes_special_tokens() -> None:
    tokenizer = make_tokenizer("{{ bos_token }}", bos_token="<s>")

    assert tokenizer.encode_chat(MESSAGES) == [0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<hi> & bye"}]'),
        ("{{ {'b': 'ü', 'a': 1} | tojson(indent=1) }}", '{\n "b": "ü",\n "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\n", "a\n  b\n"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ add_generation_prompt }} {{ tools is none }}", "True True"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_render_chat_understands_what_models_use_when_it_renders(
    template: str, expected: str
) -> None:
    variables = {"enable_thinking": False}
    assert make_tokenizer(template).render_chat(MESSAGES, variables=variables) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_render_chat_raises_when_the_template_refuses_or_misbehaves(template: str) -> None:
    with pytest.raises(ChatTemplateFailed):
        make_tokenizer(template).render_chat(MESSAGES)


def test_tokenizer_is_refused_when_its_template_is_broken() -> None:
    with pytest.raises(ChatTemplateFailed, match="template is invalid"):
        make_tokenizer("{% for %}")


def test_tokenizer_takes_the_default_template_when_the_config_names_several() -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]

    assert make_tokenizer(chat_template=templates).render_chat(MESSAGES) == "d"


def test_render_chat_raises_when_the_model_has_no_template() -> None:
    tokenizer = make_tokenizer()

    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateFailed, match="no chat template"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("kind", [tiny_tokenizers.byte_level, tiny_tokenizers.sentencepiece])
@pytest.mark.parametrize("word", ["fox", " fox", "quick", "the fox"])
def test_bad_words_are_found_in_texts(kind: Callable[[], tokenizers.Tokenizer], word: str) -> None:
    tokenizer = Tokenizer(kind())
    bad_words = tokenizer.bad_words_token_ids(["", " ", word])
    bare = word.strip()

    texts = {bare: True, f"a {bare}": True, f"a {bare} b": True, "a lazy": False}
    for text, is_in in texts.items():
        token_ids = tuple(tokenizer.encode(text))
        windows = {
            token_ids[start:end]
            for start in range(len(token_ids))
            for end in range(start + 1, len(token_ids) + 1)
        }
        assert any(tokens in windows for tokens in bad_words) == is_in, text


def test_bad_words_are_named_once_when_the_tokenizer_ignores_spaces() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.words(9))
    assert tokenizer.bad_words_token_ids(["t3", "t4 t5", "t3"]) == ((3,), (4, 5))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma", "word_piece"])
def test_token_bytes_join_to_the_text(kind: str) -> None:
    library = tiny_tokenizers.with_added(tiny_tokenizers.KINDS[kind]())
    tokenizer = Tokenizer(library)
    text = "the foxes" if kind == "word_piece" else "the fox 你 <|im_end|>\n🦊"
    token_ids = tokenizer.encode(text)

    joined = b"".join(map(tokenizer.token_bytes, token_ids)).decode()

    decoded = library.decode(token_ids, skip_special_tokens=False)
    assert joined.lstrip(" ") == decoded.lstrip(" ")
    assert "".join(map(tokenizer.token_text, token_ids)).count("\N{REPLACEMENT CHARACTER}") == (
        0 if kind == "word_piece" else sum(len(b) != len(b.decode(errors="ignore").encode())
        for b in map(tokenizer.token_bytes, token_ids))
    )  # fmt: skip


def test_vocabulary_is_told_when_there_are_added_tokens() -> None:
    library = tiny_tokenizers.with_added(tiny_tokenizers.sentencepiece())
    tokenizer = Tokenizer(library)

    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.token_id("<|im_end|>") in tokenizer.special_token_ids
    assert tokenizer.token_id("<tool_call>") not in tokenizer.special_token_ids
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.count("the fox") == len(library.encode("the fox", add_special_tokens=False))


async def test_long_texts_are_the_same_when_a_thread_does_them() -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    text = "the quick fox 你好 " * 1000
    token_ids = tokenizer.encode(text)

    assert await tokenizer.encode_async(text) == token_ids
    assert await tokenizer.decode_async(token_ids) == tokenizer.decode(token_ids) == text
    assert await tokenizer.encode_chat_async([{"role": "user", "content": text}]) == token_ids


def test_text_is_refused_when_it_has_half_a_surrogate_pair() -> None:
    tokenizer = make_tokenizer()

    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")
    assert tokenizer.decode([-1, 2**31 - 1]) == ""


def test_encoding_releases_the_lock_when_text_is_long() -> None:
    tokenizer = make_tokenizer()
    text = "the quick fox 你好 " * 40_000
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.001)
        num_turns += 1

    # With Python's lock held there would be two: before it and after it.
    assert num_turns > 5
