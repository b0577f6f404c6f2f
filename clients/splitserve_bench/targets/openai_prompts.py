"""The prompts of a dialog, as OpenAI's endpoints take them."""

from __future__ import annotations

from typing import Any

from splitserve_bench.workloads.conversation import Piece, Turn
from splitserve_bench.workloads.prompt_tokens import PromptTokens

# Short and common, so that most vocabularies have one token for each, with the space before it.
_TEXT = """
apple arm ball bath bear bed bell bird boat book box bread brother car cat chair clock cloud coat
corn cow cup day dog door dress ear egg eye face farm feather fire fish flag floor flower foot
fruit garden girl glass gold grass ground hair hand hat head hill home horse house ice key king
lake lamp leaf leg letter light map milk money moon mother mouth name neck night nose paper party
path picture rain ring river road rock room rose school sea seed ship shoe sister sky snow song
spring star stone street sugar summer sun table tail time town toy train tree wall watch water
wheel wind window wing winter wood world year
"""
_WORDS = _TEXT.split()
NUM_WORDS = len(_WORDS)


class TokenPrompts:
    """Of completions: token ids, so that their number is exact.

    What was answered is text, so the next turn has other tokens in its place, as many of them.
    """

    path = "completions"

    def __init__(self, tokens: PromptTokens) -> None:
        self._tokens = tokens
        self._token_ids: list[int] = []
        self._num_answers = 0

    def add(self, turn: Turn) -> dict[str, Any]:
        """The prompt with what this turn adds."""
        self._token_ids += self._tokens.of(turn.pieces)
        return {"prompt": self._token_ids}

    def remember(self, _text: str, num_tokens: int) -> None:
        """What was answered is part of the next prompt."""
        # Keys from here on are nobody's: those of workloads count up from 0 and down from -1.
        self._num_answers += 1
        self._token_ids += self._tokens.of([Piece(2**62 + self._num_answers, num_tokens)])


class ChatPrompts:
    """Of chats: words, about as many as make the tokens that are wanted."""

    path = "chat/completions"

    def __init__(self, words: PromptTokens, tokens_per_word: float) -> None:
        """`words`: numbers below NUM_WORDS."""
        self._words = words
        self._tokens_per_word = tokens_per_word
        self._messages: list[dict[str, str]] = []

    def add(self, turn: Turn) -> dict[str, Any]:
        """The chat with what this turn adds."""
        words = self._words.of(Piece(each.key, self._num_words(each)) for each in turn.pieces)
        text = " ".join(_WORDS[number] for number in words)
        self._messages.append({"role": "user", "content": text})
        return {"messages": self._messages}

    def _num_words(self, piece: Piece) -> int:
        return max(round(piece.num_tokens / self._tokens_per_word), 1)

    def remember(self, text: str, _num_tokens: int) -> None:
        """What was answered is part of the next prompt."""
        self._messages.append({"role": "assistant", "content": text})
