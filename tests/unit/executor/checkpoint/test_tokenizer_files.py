"""The tokenizer that clients get is that of transformers, whatever files a checkpoint has."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from executor_service.checkpoint import (
    Checkpoint,
    ModelTokenizer,
    read_tokenizer,
    tokenizer_files,
    with_tokenizer_eos,
)
from executor_service.steps import read_tokenizer_file
from splitserve_client import Tokenizer
from tests.support.models.tokenizer_folders import FOLDERS, ODD_TEXTS, SPECIAL, write_config

MODEL_TYPES = ["llama", "mistral", "gpt2", "qwen2"]


def checkpoint_in(folder: Path, model_type: str = "llama") -> Checkpoint:
    content = {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(content))
    return Checkpoint(folder, (), content)


def client_tokenizer(read: ModelTokenizer) -> Tokenizer:
    files = {name: read_tokenizer_file(file) for name, file in read.files.items()}
    return Tokenizer.from_files(files)


def read_in(folder: Path, model_type: str = "llama") -> Tokenizer:
    return client_tokenizer(read_tokenizer(checkpoint_in(folder, model_type)))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("kind", FOLDERS)
def test_token_ids_are_those_of_transformers_for_all_files(
    kind: str, model_type: str, tmp_path: Path
) -> None:
    FOLDERS[kind](tmp_path)
    read = read_tokenizer(checkpoint_in(tmp_path, model_type))
    if kind.startswith("vocab") and model_type == "mistral":
        with pytest.raises(ValueError, match="instantiate"):
            AutoTokenizer.from_pretrained(tmp_path)
        assert read == ModelTokenizer()
        return
    own = client_tokenizer(read)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)

    for text in ODD_TEXTS:
        for adds in (True, False):
            expected = theirs(text, add_special_tokens=adds)["input_ids"]
            assert own.encode(text, add_special_tokens=adds) == expected, (text, adds)
        ids = own.encode(text)
        for skips in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert own.decode(ids, skip_special_tokens=skips) == expected, (text, skips)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "t", "##wo", "##s", "Two", "."]


@pytest.mark.parametrize("lowers", [False, True])
@pytest.mark.parametrize("model_type", ["bert", "mpnet", "roberta"])
def test_pairs_and_prompts_are_those_of_sentence_transformers(
    model_type: str, lowers: bool, tmp_path: Path
) -> None:
    if model_type == "roberta":
        FOLDERS["tokenizer.json"](tmp_path)
        write_config(tmp_path, tokenizer_class="RobertaTokenizer", **SPECIAL)
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
        name = "BertTokenizer" if model_type == "bert" else "MPNetTokenizer"
        write_config(tmp_path, tokenizer_class=name, do_lower_case=False)
    sentences = {"prompts": {"query": "one "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": lowers}))
    own = read_in(tmp_path, model_type).vector_texts
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)

    assert own.prompt(None) == "one "
    for max_tokens in (None, 7):
        cut = {"truncation": max_tokens is not None, "max_length": max_tokens}
        for first, second in (("one two.", "Twos one Two"), ("Two", ". . . . . .")):
            texts = (first.lower(), second.lower()) if lowers else (first, second)
            expected = theirs(*texts, return_token_type_ids=True, **cut)
            pair = own.encode_pair(first, second, max_tokens=max_tokens)
            assert pair.token_ids == expected["input_ids"]
            types = expected["token_type_ids"]
            assert pair.second_text_start == (types.index(1) if 1 in types else 0)
            expected = theirs(texts[1], **cut)["input_ids"]
            assert own.encode(second, max_tokens=max_tokens) == expected


CHAT = [{"role": "user", "content": "hi"}]


def test_special_tokens_reach_templates_when_no_file_names_them(tmp_path: Path) -> None:
    FOLDERS["sentencepiece"](tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    assert read_in(tmp_path).render_chat(CHAT) == "<s>|</s>"


def test_template_is_that_of_a_processor_when_there_is_no_other(tmp_path: Path) -> None:
    FOLDERS["tokenizer.json"](tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of old"}))
    assert read_in(tmp_path).render_chat(CHAT) == "of old"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert read_in(tmp_path).render_chat(CHAT) == "newer"


def test_tokenizer_has_no_files_when_a_checkpoint_has_no_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(tmp_path, tokenizer_class="Qwen2Tokenizer", **SPECIAL)
    with caplog.at_level(logging.INFO):
        read = read_tokenizer(checkpoint_in(tmp_path, "qwen2"))

    assert read == ModelTokenizer()
    assert "tokenizer_missing" in caplog.text


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_tokenizer_has_no_files_when_a_vocabulary_is_broken(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"\x00broken")
    monkeypatch.setattr(tokenizer_files, "find_spec", lambda _name: None)
    assert read_tokenizer(checkpoint_in(tmp_path)) == ModelTokenizer()
    (line,) = [r.getMessage() for r in caplog.records if "tokenizer_unreadable" in r.getMessage()]
    assert f"source={name}" in line
    # Only this format needs packages.
    said = "not installed: sentencepiece, tiktoken" in line
    assert said == (name == "tokenizer.model")


def test_tekken_is_converted_when_transformers_has_no_form_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FOLDERS["tekken"](tmp_path)
    expected = read_in(tmp_path).encode("hello world")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    assert read_in(tmp_path).encode("hello world") == expected


def test_tokenizer_json_is_given_out_when_its_class_is_custom_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FOLDERS["tokenizer.json"](tmp_path)
    auto_map = {"AutoTokenizer": [None, "tokenization_x.XTokenizer"]}
    write_config(tmp_path, tokenizer_class="XTokenizer", eos_token="</s>", auto_map=auto_map)
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('custom code ran')")

    read = read_tokenizer(checkpoint_in(tmp_path))

    assert client_tokenizer(read).encode("hello")
    assert read.eos_token_id == 1


def test_templates_are_left_out_when_their_names_have_control_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FOLDERS["tokenizer.json"](tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "a\x1b[2Jb.jinja").write_text("x")
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("x")

    files = read_tokenizer(checkpoint_in(tmp_path)).files

    assert [name for name in files if "templates" in name] == [
        "additional_chat_templates/rag.jinja"
    ]
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize(
    ("kind", "eos_token_id"),
    [
        ("sentencepiece", 2),
        ("sentencepiece as Llama's", 2),
        ("vocab and merges", 1),
        ("tekken", None),
        ("tekken with config", 2),
        ("tokenizer.json", 1),
        ("only its class has one", None),
    ],
)
def test_eos_is_the_one_that_the_files_name(
    kind: str, eos_token_id: int | None, tmp_path: Path
) -> None:
    if kind in FOLDERS:
        FOLDERS[kind](tmp_path)
    else:
        FOLDERS["vocab and merges"](tmp_path)
        write_config(tmp_path, tokenizer_class="GPT2Tokenizer")
    assert read_tokenizer(checkpoint_in(tmp_path)).eos_token_id == eos_token_id


@pytest.mark.parametrize(
    ("named", "own", "expected", "event"),
    [
        ((2,), 5, (2, 5), "tokenizer_eos_added token_id=5 eos_token_ids=[2]"),
        ((), 5, (5,), "tokenizer_eos_added token_id=5 eos_token_ids=[]"),
        ((5, 2), 5, (5, 2), None),
        ((2,), None, (2,), None),
        ((2,), 10, (2,), "tokenizer_eos_ignored token_id=10"),
    ],
)
def test_eos_of_the_tokenizer_is_added_or_logged(
    named: tuple[int, ...],
    own: int | None,
    expected: tuple[int, ...],
    event: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert with_tokenizer_eos(named, ModelTokenizer({}, own), 10) == expected

    assert [event in line for line in caplog.messages] == [True] if event else not caplog.messages
