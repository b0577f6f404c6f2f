"""Scores of tokens in the shapes of completions, of chats, and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Self

from splitserve_client import Detokenizer, Tokenizer, TokenLogprob, TopLogprob

# What JSON has no number for.
_LEAST_LOGPROB = -9999.0


class TokenNames:
    """What tokens are called: their text, or `token_id:N`, as all are without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        return [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, piece by piece.

    `detokenizer`: says where in the choice's text each token begins; None where there is no text.
    """

    def __init__(self, names: TokenNames, detokenizer: Detokenizer | None, offset: int = 0) -> None:
        self._names = names
        self._detokenizer = detokenizer
        self._offset = offset

    def fork(self) -> Self:
        """Those of another choice that begins here."""
        other = copy(self)
        if self._detokenizer is not None:
            other._detokenizer = self._detokenizer.fork()
        return other

    def unscored(self, token_id: int) -> dict[str, list[object]]:
        """Of a prompt's first token, which nothing comes before."""
        shape: dict[str, list[object]] = {
            "tokens": [self._names.name(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._advance(token_id)
        return shape

    def shape(self, scores: Iterable[TokenLogprob]) -> dict[str, list[object]]:
        """Of the tokens that come next."""
        tokens: list[object] = []
        logprobs: list[object] = []
        tops: list[object] = []
        offsets: list[object] = []
        for score in scores:
            tokens.append(self._names.name(score.token_id))
            logprobs.append(finite(score.logprob))
            tops.append(self._top(score))
            offsets.append(self._offset)
            self._advance(score.token_id)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _advance(self, token_id: int) -> None:
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The token itself and the best; of tokens with one text, the more probable."""
        own = TopLogprob(score.token_id, score.logprob)
        top: dict[str, float] = {}
        for entry in (own, *score.top):
            name = self._names.name(entry.token_id)
            top[name] = max(top.get(name, -math.inf), finite(entry.logprob))
        return top


def joined(shapes: Sequence[dict[str, list[object]]]) -> dict[str, list[object]]:
    """One shape of several that follow each other."""
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [entry for shape in shapes for entry in shape[key]] for key in keys}


def chat_logprobs(scores: Iterable[TokenLogprob], names: TokenNames) -> list[dict[str, object]]:
    """`logprobs.content` of a chat."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": names.name(token_id),
            "logprob": finite(logprob),
            "bytes": names.bytes_of(token_id),
        }

    return [
        {
            **entry(score.token_id, score.logprob),
            "top_logprobs": [entry(top.token_id, top.logprob) for top in score.top],
        }
        for score in scores
    ]


def prompt_logprobs(scores: Iterable[TokenLogprob], names: TokenNames) -> list[object]:
    """The `prompt_logprobs` of vLLM: null for the first token, then by token id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        name = names.name(token_id)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": name}

    shapes: list[object] = [None]
    for score in scores:
        shape = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        for rank, top in enumerate(score.top, 1):
            shape.setdefault(str(top.token_id), entry(top.token_id, top.logprob, rank))
        shapes.append(shape)
    return shapes


def finite(logprob: float) -> float:
    """`logprob` as JSON can say it."""
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
