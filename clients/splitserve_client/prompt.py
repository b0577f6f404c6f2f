"""Prompts as text: a text that is continued, or a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from splitserve_client.chat_template import Message, TemplateOptions
from splitserve_client.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text. `is_raw`: no chat template; otherwise one is used if the model has one.

    `messages`: a chat instead of the text, rendered with the options of `template`. `token_ids`:
    the prompt itself, instead of either; the answer then continues it.
    """

    text: str = ""
    system: str = ""
    is_raw: bool = False
    token_ids: tuple[int, ...] = ()
    messages: Sequence[Message] = ()
    template: TemplateOptions = field(default_factory=TemplateOptions)

    async def encode_async(self, tokenizer: Tokenizer | None) -> list[int]:
        """Its token ids. What takes its time is done in a thread.

        Raises ChatTemplateFailed, InvalidRequest.
        """
        if tokenizer is None or self.token_ids:
            return list(self.token_ids)
        if not self.is_chat(tokenizer):
            return await tokenizer.encode_async(self.text)
        return await tokenizer.encode_chat_async(self._chat(), **self.template)

    def is_chat(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the answer is a new message rather than a continuation."""
        if tokenizer is None or self.token_ids:
            return False
        return bool(self.messages) or (tokenizer.has_chat_template and not self.is_raw)

    def _chat(self) -> Sequence[Message]:
        if self.messages:
            return self.messages
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.text}]


# A text is continued as it is, messages are a chat, and a Prompt says what it is.
AnyPrompt: TypeAlias = str | Prompt | Sequence[Mapping[str, Any]]


def as_prompt(prompt: AnyPrompt) -> Prompt:
    """The same as a Prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, is_raw=True)
    return Prompt(messages=prompt)
