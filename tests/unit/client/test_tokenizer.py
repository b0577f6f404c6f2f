from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers

from splitserve_client import ChatTemplateFailed, Tokenizer, TokenizerUnavailable
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


def test_tokenizer_round_trips_when_text_has_many_scripts() -> None:
    tokenizer = make_tokenizer()
    text = "Straße 你好 🦊\n"

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_is_refused_when_its_main_file_is_missing_or_broken() -> None:
    with pytest.raises(TokenizerUnavailable, match=r"no tokenizer\.json"):
        Tokenizer.from_files({})
    with pytest.raises(TokenizerUnavailable, match="not readable"):
        Tokenizer.from_files({"tokenizer.json": b"{"})


def test_render_chat_gives_special_tokens_when_they_are_objects_or_texts() -> None:
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
    with pytest.raises(ChatTemplateFailed, match="broken"):
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
def test_bad_words_are_found_in_texts_when_they_are_written_as_usual(
    kind: Callable[[], tokenizers.Tokenizer], word: str
) -> None:
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
