"""Tokenizer of a GGUF file, in the form of `tokenizers`.

A file has the vocabulary with scores or merges, and names the rule by which text is split before
merging; the rules themselves are code of llama.cpp (src/llama-vocab.cpp of
https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_END_OF_SPLITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_END_OF_CASED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|\p{{N}}{digits}{_END_OF_SPLITS}"


def _cased_words(digits: str, contractions: str) -> str:
    """Returns a rule that also splits words where upper case begins."""
    return (
        f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{contractions}"
        f"|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{contractions}"
        rf"|\p{{N}}{digits}{_END_OF_CASED}"
    )


_GROUPS_OF_3 = _words("{1,3}")
_SINGLE_DIGITS = _words("")
# Rules of byte-level vocabularies by `tokenizer.ggml.pre`.
_SPLITS = {
    "llama3": _GROUPS_OF_3,
    "llama-v3": _GROUPS_OF_3,
    "llama-bpe": _GROUPS_OF_3,
    "falcon3": _GROUPS_OF_3,
    "pixtral": _GROUPS_OF_3,
    "dbrx": _GROUPS_OF_3,
    "smaug-bpe": _GROUPS_OF_3,
    "qwen2": _SINGLE_DIGITS,
    "deepseek-r1-qwen": _SINGLE_DIGITS,
    "megrez": _SINGLE_DIGITS,
    "tekken": _cased_words("", ""),
    "gpt-4o": _cased_words("{1,3}", f"{_CONTRACTIONS}?"),
    "llama4": _cased_words("{1,3}", f"{_CONTRACTIONS}?"),
}
# The same as GPT-2's, after each digit is split off.
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_GPT2 = frozenset({"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone"})
# A word that is a token is not split up, whatever the merges say.
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})


class TokenizerUnknown(ValueError):
    """The file's tokenizer is of a kind that is not read; the message names it."""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that `metadata` of a GGUF file describe. Raises TokenizerUnknown."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or kind not in ("gpt2", "llama"):
        raise TokenizerUnknown(f"tokenizer.ggml.model is {kind!r}; allowed: gpt2, llama")
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _pieces(metadata, tokens)
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for number, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        own = [token for token, each in zip(tokens, kinds, strict=False) if each == number]
        added = [AddedToken(token, normalized=False, special=is_special) for token in own]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    processor = _begin_and_end(metadata, tokens, is_begin_usual=kind == "llama")
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer that merges bytes, as GPT-2's."""
    rule = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in _WHOLE_WORDS_FIRST)
    )
    if rule in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif rule in _DIGITS_FIRST:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif rule in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        allowed = ", ".join(sorted({*_SPLITS, *_DIGITS_FIRST, *_GPT2}))
        raise TokenizerUnknown(f"tokenizer.ggml.pre is {rule!r}; allowed: {allowed}")
    if rule in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of pieces, as SentencePiece's byte-pair encoding."""
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:
        # Such files have tokens of several spaces as spaces.
        tokens = [_SPACE * len(token) if not token.strip(" ") else token for token in tokens]
        ranks: Sequence[float] = range(0, -len(tokens), -1)
    else:
        ranks = metadata.get("tokenizer.ggml.scores") or ()
        if len(ranks) != len(tokens):
            raise TokenizerUnknown("tokenizer.ggml.scores is missing; allowed: one for each token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(_merges(vocabulary, ranks)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    plain: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        normal.insert(0, normalizers.Prepend(_SPACE))
        plain.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], ranks: Sequence[float]) -> Iterable[tuple[str, str]]:
    """Returns all pairs of tokens whose concatenation is a token, the best first."""
    found = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                order = (vocabulary[left], vocabulary[right])
                found.append((-ranks[index], order, left, right))
    found.sort()
    return ((left, right) for _, _, left, right in found)


def _begin_and_end(
    metadata: Mapping[str, Any], tokens: Sequence[str], *, is_begin_usual: bool
) -> Any:  # noqa: ANN401
    """Returns what adds the tokens that begin and end each text; None if there are none."""
    usual = is_begin_usual or metadata.get("tokenizer.ggml.pre") in ("llama3", "llama-bpe")
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    end = metadata.get("tokenizer.ggml.eos_token_id")
    first, last = [], []
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", usual):
        first = [tokens[begin]]
    if end is not None and metadata.get("tokenizer.ggml.add_eos_token", False):
        last = [tokens[end]]
    if not first and not last:
        return None
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{each}:1" for each in first), "$B:1"],
        special_tokens=[(token, tokens.index(token)) for token in (*first, *last)],
    )
