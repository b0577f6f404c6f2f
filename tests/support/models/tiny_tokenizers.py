"""Small tokenizers of the kinds that models have."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "Grüße aus Köln, Straße, naïve café, Привет мир, 你好世界, こんにちは",
    "def f(x):\n    return x + 1\n\n  indented   text",
    "🦊🦊 🐉 👩‍👩‍👧",
]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes as characters, with merges across character boundaries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral: spaces as underlines, bytes for what is not in the vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in "▁abcdefghijklmnopqrstuvwxyzüß\n":
        vocab[character] = len(vocab)
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("▁", "▁"),
        ("o", "x"),
        ("f", "ox"),
        ("▁", "fox"),
    ]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` with tokens that were added to it: special ones and others, odd ones, too."""
    tokenizer.add_special_tokens(
        [
            AddedToken("<|im_end|>", special=True),
            AddedToken("<|ü🦊|>", special=True, lstrip=True, rstrip=True),
            AddedToken(" <|space| ", special=True),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("<tool_call>"),
            AddedToken("<think>", lstrip=True),
            AddedToken("  ", rstrip=True, normalized=False),
            AddedToken("Ġ▁##é 你", normalized=False),
            AddedToken("##"),
            AddedToken("<0x+A>"),
            AddedToken("<0xfF>"),
            AddedToken("\N{REPLACEMENT CHARACTER}"),
        ]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """As `sentencepiece`, and the first space stays."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and XLM-R: spaces as underlines, and the first token loses its own."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    return tokenizer


def bytes_then_metaspace() -> Tokenizer:
    """As Helium: runs of bytes are joined before spaces are read, and nothing after it."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")]
    )
    return tokenizer


def strip_of_three() -> Tokenizer:
    """A decoder that cuts more than one space off, if they are there."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 3, 0),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: a space before each word, none before its later parts, and none before stops."""
    words_ = ["[UNK]", "the", "fox", "##es", "##e", "do", "not", ".", "!", ",", "'", "s", "n't"]
    vocab = {word: number for number, word in enumerate(words_)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


def suffixes() -> Tokenizer:
    """As GPT-1: the end of a word is written, and the last word has no space after it."""
    vocab = {word: number for number, word in enumerate(["the</w>", "fox</w>", "f", "o", "x</w>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="f"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def words(num_words: int, *, is_reversed: bool = False) -> Tokenizer:
    """Token `n` is the word `tn`, or the `n`th from the last; a space lies between two words."""
    numbers = reversed(range(num_words)) if is_reversed else range(num_words)
    vocab = {f"t{number}": token_id for token_id, number in enumerate(numbers)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "bytes_then_metaspace": bytes_then_metaspace,
    "gemma": gemma,
    "metaspace": metaspace,
    "sentencepiece": sentencepiece,
    "strip_of_three": strip_of_three,
    "suffixes": suffixes,
    "word_piece": word_piece,
    "words": lambda: words(20),
}
