"""Prompts: a text to continue, or a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt as a text, a chat or token ids.

    `is_raw`: skip the chat template, which otherwise is used if the model has one. `messages`: a
    chat in place of the text, rendered with the options of `template`. `token_ids`: the encoded
    prompt in place of either; the answer then continues it.
    """

    text: str = ""
    system: str = ""
    is_raw: bool = False
    token_ids: tuple[int, ...] = ()
    messages: Sequence[Message] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)

    async def encode_async(self, tokenizer: Tokenizer | None) -> list[int]:
        """Returns the token ids of the prompt; slow encoding runs in a thread.

        Raises ChatTemplateFailed, InvalidRequest.
        """
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return await tokenizer.encode_async(self.text)
        return await tokenizer.encode_chat_async(self._chat(), **self.template)

    def is_chat(self, tokenizer: Tokenizer | None) -> bool:
        """Returns whether the answer is a new message rather than a continuation of the prompt."""
        if tokenizer is None or self.token_ids:
            return False
        return bool(self.messages) or (tokenizer.has_chat_template and not self.is_raw)

    def _chat(self) -> Sequence[Message]:
        if self.messages:
            return self.messages
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]


# A `str` is continued, a sequence of messages is a chat.
AnyPrompt: TypeAlias = str | Prompt | Sequence[Mapping[str, Any]]


def as_prompt(prompt: AnyPrompt) -> Prompt:
    """Converts any prompt to a Prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, is_raw=True)
    return Prompt(messages=prompt)
