"""Chats whose answer is known: a model that copies what a message says (copying_model.py)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.stack import BUNDLED
from tests.support.models.copying_model import make_copying_model

DISTANCE = 600
Message = dict[str, Any]


class Speaker:
    """A copying model in a folder, with the bundled model's tokenizer, and chats that it answers.

    `template`: file of the chat template. `special_tokens`: tokens beside those of the bundled
    model.
    """

    def __init__(self, folder: Path, template: Path, special_tokens: Sequence[str] = ()) -> None:
        from transformers import AutoTokenizer

        for file in BUNDLED.glob("tokenizer*"):
            shutil.copy(file, folder / file.name)
        untyped: Any = AutoTokenizer
        self._tokenizer = untyped.from_pretrained(folder)
        if special_tokens:
            self._tokenizer.add_tokens(list(special_tokens), special_tokens=True)
            self._tokenizer.save_pretrained(folder)
        shutil.copy(template, folder / "chat_template.jinja")
        self._source = template.read_text()
        self.folder = make_copying_model(
            folder,
            vocab_size=len(self._tokenizer),
            distance=DISTANCE,
            eos_token_id=self._tokenizer.eos_token_id,
            num_positions=2048,
        )

    def messages(
        self, text: str, tools: Sequence[Any] | None = None, template: str | None = None
    ) -> list[Message]:
        """Returns a chat whose answer is `text`, until the end of the turn.

        `template`: source of the chat template, in place of the model's own.
        """
        said = text + self._tokenizer.eos_token
        for filler in range(DISTANCE):
            last = {"role": "user", "content": "1" * filler}
            chat = [{"role": "user", "content": said}, {"role": "assistant", "content": "-"}, last]
            prompt = self.prompt(chat, tools, template)
            start = prompt.rindex(said)
            encoded = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
            begins = [begin for begin, _ in encoded["offset_mapping"]]
            assert start in begins, "the text begins with a token"
            if len(begins) - begins.index(start) == DISTANCE:
                return chat
        raise AssertionError(f"{text!r} is too long")

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        template: str | None = None,
    ) -> str:
        """Returns the prompt of a chat, as transformers renders it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        source = template or self._source
        options: Any = {"tools": tools, "add_generation_prompt": True, "chat_template": source}
        if all(message.get("content", "") is not None for message in messages):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
        # `apply_chat_template` drops null contents, for which some templates look.
        tokens = self._tokenizer.special_tokens_map
        return str(render_jinja_template([messages], **options, **tokens)[0][0])
