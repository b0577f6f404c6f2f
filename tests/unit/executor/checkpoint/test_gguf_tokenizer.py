"""Tokenizers of GGUF files, compared with SentencePiece and with a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from executor_service.checkpoint import TokenizerUnknown, build_gguf_tokenizer

TEXT = (Path(__file__).parents[4] / "README.md").read_text()
TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  two leading spaces\n\n\tand a tab  ",
    "Größe, naïve, 你好, 🙂, \u00e9\u0301",
    TEXT[:2000],
    "<|turn|>user\nHi<|end|>",
]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "model"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|turn|>", "<|end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "model.model"))


def pieces_metadata(pieces: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's converter writes."""
    ids = range(pieces.get_piece_size())
    kinds = [
        2 if pieces.is_unknown(index)
        else 3 if pieces.is_control(index)
        else 6 if pieces.is_byte(index)
        else 4 if pieces.id_to_piece(index).startswith("<|")
        else 1
        for index in ids
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [pieces.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
    }


@pytest.mark.parametrize("text", TEXTS[:4])
def test_pieces_are_those_of_sentencepiece(
    pieces: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    tokenizer = build_gguf_tokenizer(pieces_metadata(pieces))

    encoded = tokenizer.encode(text)

    assert encoded.ids == [pieces.bos_id(), *pieces.encode(text)]
    assert tokenizer.decode(encoded.ids) == text


@pytest.mark.parametrize(("adds", "begin"), [(True, [1]), (False, [])])
def test_pieces_begin_as_the_file_says(
    pieces: sentencepiece.SentencePieceProcessor, *, adds: bool, begin: list[int]
) -> None:
    tokenizer = build_gguf_tokenizer(
        pieces_metadata(pieces) | {"tokenizer.ggml.add_bos_token": adds}
    )

    assert tokenizer.encode("Hi").ids == [*begin, *pieces.encode("Hi")]


SPLITS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def byte_level(rule: str) -> Tokenizer:
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    split = (
        pre_tokenizers.Split(Regex(SPLITS[rule]), behavior="isolated")
        if rule in SPLITS
        else pre_tokenizers.Digits(individual_digits=True)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in SPLITS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|turn|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.mark.parametrize("rule", [*SPLITS, "smollm"])
def test_bytes_are_merged_as_in_the_original(rule: str) -> None:
    import json

    original = byte_level(rule)
    state = json.loads(original.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
    }

    tokenizer = build_gguf_tokenizer(metadata)

    for text in TEXTS:
        expected = original.encode(text).ids
        assert tokenizer.encode(text).ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "model is 'rwkv'"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.model is 'gpt2'"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": [],
                "tokenizer.ggml.pre": "x",
            },
            "tokenizer.ggml.pre is 'x'; allowed: ",
        ),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "scores is missing"),
    ],
)
def test_tokenizer_is_refused_when_it_is_not_read(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerUnknown, match=message):
        build_gguf_tokenizer(metadata)
