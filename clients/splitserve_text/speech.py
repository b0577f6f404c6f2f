"""Special tokens of speech models: languages, tasks, timestamps, and tokens that are not sampled.

Source: Radford 2022, "Robust speech recognition via large-scale weak supervision", section 2.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from splitserve_common import parse_json
from splitserve_text.errors import TokenizerUnavailable
from splitserve_text.tokenizer import Tokenizer
from splitserve_text.values import TranscriptionRules

_FILE = "generation_config.json"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_START, _END = "<|startoftranscript|>", "<|endoftext|>"
_NO_TIMESTAMPS, _PREVIOUS = "<|notimestamps|>", "<|startofprev|>"

SpeechTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """Special tokens of a speech model.

    `languages`: token ids by code; empty if the model knows one language only, and has no `tasks`.
    `previous`: stands before the text that precedes the audio; None if there is none.
    `suppressed`: tokens that are never sampled; `first_suppressed`: not as the first one.
    `max_first_timestamp`: the largest first timestamp, counted from `first_timestamp`; None for no
    limit.
    """

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    previous: int | None
    suppressed: tuple[int, ...]
    first_suppressed: tuple[int, ...]
    max_first_timestamp: int | None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], tokenizer: Tokenizer) -> Self:
        """Reads the tokens from the files of a model. Raises TokenizerUnavailable."""
        settings = _read(files)
        needed = {name: tokenizer.token_id(name) for name in (_START, _END, _NO_TIMESTAMPS)}
        missing = [name for name, token_id in needed.items() if token_id is None]
        if missing:
            raise TokenizerUnavailable(f"the tokenizer has no token {missing[0]}")
        is_multilingual = settings.get("is_multilingual") is not False
        languages = {
            match[1]: token_id
            for token, token_id in tokenizer.special_tokens.items()
            if (match := _LANGUAGE.fullmatch(token))
        }
        tasks = {name: tokenizer.token_id(f"<|{name}|>") for name in ("transcribe", "translate")}
        most = settings.get("max_initial_timestamp_index")
        return cls(
            start=needed[_START] or 0,
            end=needed[_END] or 0,
            no_timestamps=needed[_NO_TIMESTAMPS] or 0,
            languages=languages if is_multilingual else {},
            tasks={n: t for n, t in tasks.items() if t is not None} if is_multilingual else {},
            previous=tokenizer.token_id(_PREVIOUS),
            suppressed=_token_ids(settings, "suppress_tokens"),
            first_suppressed=_token_ids(settings, "begin_suppress_tokens"),
            max_first_timestamp=most if isinstance(most, int) and most >= 0 else None,
        )

    @property
    def first_timestamp(self) -> int:
        """Timestamp token of 0 seconds; later times have larger token ids."""
        return self.no_timestamps + 1

    def prompt(
        self,
        language: str | None,
        task: SpeechTask,
        *,
        has_timestamps: bool,
        previous_text: Sequence[int] = (),
    ) -> list[int]:
        """Returns the first tokens of the decoder. `language`: None for a model of one language."""
        prompt = [self.start]
        if self.previous is not None and previous_text:
            prompt = [self.previous, *previous_text, self.start]
        if language is not None:
            prompt += [self.languages[language], self.tasks[task]]
        return prompt if has_timestamps else [*prompt, self.no_timestamps]

    def rules(self, *, has_timestamps: bool) -> TranscriptionRules:
        """Returns the rules for the output."""
        if not has_timestamps:
            return TranscriptionRules(self.first_suppressed)
        return TranscriptionRules(
            self.first_suppressed, self.first_timestamp, self.end, self.max_first_timestamp
        )


def _read(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the contents of generation_config.json; an empty object without a usable file."""
    try:
        content = parse_json(files.get(_FILE, b"{}").decode())
    except (ValueError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _token_ids(settings: Mapping[str, Any], name: str) -> tuple[int, ...]:
    found = settings.get(name)
    if not isinstance(found, list):
        return ()
    return tuple(item for item in found if isinstance(item, int) and item >= 0)
