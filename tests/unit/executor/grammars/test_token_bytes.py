"""The text of each token, by the files of tokenizers of all kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from executor_service.checkpoint import Checkpoint, read_tokenizer
from executor_service.grammars import TokenizerUnsupported, Vocabulary, read_token_bytes
from tests.support.models.tiny_tokenizers import byte_level, sentencepiece, words
from tests.support.models.tokenizer_folders import FOLDERS

BUNDLED = Path("executor_service/bundled_model/tokenizer.json")


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("t", -3.0), ("he", -4.0), ("ß", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def metaspace_with_bytes() -> Tokenizer:
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "äö x")])
    tokenizer.add_special_tokens(["<|special|>"])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "metaspace_with_bytes": metaspace_with_bytes,
    "bundled": lambda: Tokenizer.from_file(str(BUNDLED)),
}


def read(tokenizer: Tokenizer, folder: Path, vocab_size: int = 0) -> list[bytes]:
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    return read_token_bytes(path, vocab_size)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_are_what_the_tokenizer_decodes_when_a_token_follows_others(
    name: str, tmp_path: Path
) -> None:
    """Between letters, so that no text begins or ends with it. Broken UTF-8 is replaced in both."""
    tokenizer = with_added(TOKENIZERS[name]())
    token_bytes = read(tokenizer, tmp_path)
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    # Not the token of a byte: these are decoded together.
    [*_, letter] = [i for i, text in enumerate(token_bytes) if text in (b"a", b"t")]
    around = token_bytes[letter].decode()
    for token_id, text in enumerate(token_bytes):
        if token_id in special:
            assert text == b""
            continue
        decoded = tokenizer.decode([letter, token_id, letter], skip_special_tokens=False)
        assert (around + text.decode(errors="replace") + around) == decoded, token_id


def test_every_byte_has_a_token_when_the_tokenizer_knows_bytes(tmp_path: Path) -> None:
    for tokenizer in (byte_level(), sentencepiece(), metaspace_with_bytes()):
        assert {bytes([byte]) for byte in range(256)} <= set(read(tokenizer, tmp_path))


def test_ids_have_no_text_when_only_the_model_has_them(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    assert read(tokenizer, tmp_path, size + 3)[size:] == [b""] * 3
    assert len(read(tokenizer, tmp_path, size - 3)) == size


def test_piece_is_its_own_text_when_a_character_is_no_byte(tmp_path: Path) -> None:
    """\u0120 is a space, \u00c3\u00a9 are the bytes of an e with an accent."""
    pieces = ["\u0120a", " ", "", "\u00c3\u00a9", "\U0001f98a", "b \u0120", "\u0144", "c", " d"]
    spec = {
        "model": {"vocab": {piece: token_id for token_id, piece in enumerate(pieces)}},
        "decoder": {"type": "ByteLevel"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    expected = [" a", " ", "", "\u00e9", "\U0001f98a", "b \u0120", "\u0144", "c", " d"]
    assert read_token_bytes(path, 0) == [text.encode() for text in expected]


def _decoder(tokenizer: Tokenizer, decoder: object) -> str:
    spec = json.loads(tokenizer.to_str())
    spec["decoder"] = decoder
    return json.dumps(spec)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (words(5).to_str(), "no decoder"),
        (_decoder(words(5), {"type": "WordPiece", "prefix": "##"}), "WordPiece"),
        (
            _decoder(words(5), {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}),
            "regular",
        ),
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"model": {}}', "KeyError"),
    ],
)
def test_tokenizer_is_refused_when_its_bytes_cannot_be_told(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(TokenizerUnsupported, match=reason):
        read_token_bytes(path, 0)
    with pytest.raises(TokenizerUnsupported, match="cannot be read"):
        read_token_bytes(tmp_path / "missing.json", 0)


def test_token_has_no_text_when_it_is_too_long(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["x" * 900, "y" * 2000])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    vocabulary = Vocabulary.read(path, 0, (1,))
    assert list(vocabulary.has_text[size : size + 2]) == [1, 0]


def test_vocabulary_is_refused_when_the_model_has_no_end() -> None:
    with pytest.raises(TokenizerUnsupported, match="end-of-sequence"):
        Vocabulary.read(BUNDLED, 100, ())


@pytest.mark.parametrize("kind", ["sentencepiece", "vocab and merges", "tekken with config"])
def test_a_vocabulary_is_read_when_its_tokenizer_was_converted(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    FOLDERS[kind](tmp_path)
    files = read_tokenizer(Checkpoint(tmp_path, (), {})).files

    texts = read_token_bytes(files["tokenizer.json"], 0)
    assert any(text.strip() == b"the" for text in texts) or b"hello" in texts
    assert Vocabulary.read(files["tokenizer.json"], 0, (2,)).has_text
