"""Small tokenizers of the kinds that models have."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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


def words(num_words: int) -> Tokenizer:
    """Token `n` is the word `tn`, and a space lies between two words."""
    vocab = {f"t{number}": number for number in range(num_words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
