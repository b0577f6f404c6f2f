"""Small tokenizers in the files that checkpoints have instead of, or beside, tokenizer.json."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from tests.support.models import tiny_tokenizers

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "Grüße aus Köln, Straße, naïve café, Привет мир",
    "hello hello world, hello the world",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# Texts in which tokenizers differ.
ODD_TEXTS = [
    "",
    " ",
    "hello world",
    " leading",
    "  two  inside  ",
    "tab\tand\nlines\n\n",
    "<s>",
    "a<s>b</s> c",
    "<|im_end|>hello<|im_end|>",
    " <tool> x<tool>y ",
    "Grüße, Straße, e\u0301 é \ufb01",
    "你好世界 こんにちは",
    "🦊 👩‍👩‍👧",
    "\x00\x07\u200b\u202e",
    "<0x41> ▁ Ġ ##",
]


def sentencepiece_model(model_type: str) -> bytes:
    """tokenizer.model: "bpe" as Llama 2, or "unigram" as T5; bytes for what it does not know."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS * 20),
        model_writer=content,
        vocab_size=340,
        model_type=model_type,
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return content.getvalue()


def tekken() -> str:
    """tekken.json, as Mistral's models have it."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"hel", b"lo", b"hello", b" w", b" t"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_end|>"]
    content = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(pieces),
            "default_vocab_size": len(pieces) + 10,
            "default_num_special_tokens": 10,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    return json.dumps(content)


def write_config(folder: Path, **settings: Any) -> None:  # noqa: ANN401
    """tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def added(token: str, *, special: bool = True, **flags: bool) -> dict[str, object]:
    """An entry of `added_tokens_decoder`."""
    names = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": token, "special": special, **dict.fromkeys(names, False), **flags}


def _spm(model_type: str, **settings: Any) -> Callable[[Path], None]:  # noqa: ANN401
    def write(folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(model_type))
        if settings:
            write_config(folder, **settings)

    return write


def _vocab_and_merges(folder: Path) -> None:
    tiny_tokenizers.byte_level().model.save(str(folder))
    write_config(folder, tokenizer_class="GPT2Tokenizer", eos_token="</s>", bos_token="<s>")


def _spm_with_added(folder: Path) -> None:
    _spm("bpe", tokenizer_class="LlamaTokenizer", **SPECIAL)(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 340, "<|im_start|>": 341}))


def _vocab_with_prefix_space(folder: Path) -> None:
    _vocab_and_merges(folder)
    write_config(folder, tokenizer_class="GPT2Tokenizer", eos_token="</s>", add_prefix_space=True)


def _tokenizer_json(**settings: Any) -> Callable[[Path], None]:  # noqa: ANN401
    def write(folder: Path) -> None:
        tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
        write_config(folder, eos_token="</s>", **settings)

    return write


def _tekken(folder: Path) -> None:
    (folder / "tekken.json").write_text(tekken())


def _tekken_with_config(folder: Path) -> None:
    _tekken(folder)
    write_config(folder, tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True, **SPECIAL)


_ADDED = {"340": added("<|im_end|>"), "341": added("<tool>", special=False, lstrip=True)}
_ADDED_TO_BYTES = {"420": added("<|im_end|>"), "421": added("<tool>", special=False, rstrip=True)}

# What writes the tokenizer's files into a folder.
FOLDERS: Mapping[str, Callable[[Path], None]] = {
    "sentencepiece": _spm("bpe"),
    "sentencepiece of unigrams": _spm("unigram"),
    "sentencepiece as Llama's": _spm(
        "bpe", tokenizer_class="LlamaTokenizer", added_tokens_decoder=_ADDED, **SPECIAL
    ),
    "sentencepiece not legacy": _spm(
        "bpe", tokenizer_class="LlamaTokenizer", legacy=False, add_eos_token=True, **SPECIAL
    ),
    "sentencepiece without bos": _spm(
        "unigram", tokenizer_class="LlamaTokenizer", add_bos_token=False, **SPECIAL
    ),
    "sentencepiece and added_tokens.json": _spm_with_added,
    "vocab and merges": _vocab_and_merges,
    "vocab and a prefix space": _vocab_with_prefix_space,
    "tekken": _tekken,
    "tekken with config": _tekken_with_config,
    "tokenizer.json": _tokenizer_json(),
    "tokenizer.json with added tokens": _tokenizer_json(added_tokens_decoder=_ADDED_TO_BYTES),
    "tokenizer.json with a prefix space": _tokenizer_json(
        tokenizer_class="GPT2Tokenizer", add_prefix_space=True
    ),
    "tokenizer.json with bos": _tokenizer_json(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", add_bos_token=True
    ),
}
