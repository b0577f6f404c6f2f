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

    `template`: file of the chat template.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        from transformers import AutoTokenizer

        for file in BUNDLED.glob("tokenizer*"):
            shutil.copy(file, folder / file.name)
        shutil.copy(template, folder / "chat_template.jinja")
        untyped: Any = AutoTokenizer
        self._tokenizer = untyped.from_pretrained(folder)
        self.folder = make_copying_model(
            folder,
            vocab_size=len(self._tokenizer),
            distance=DISTANCE,
            eos_token_id=self._tokenizer.eos_token_id,
            num_positions=2048,
        )

    def messages(self, text: str, tools: Sequence[Any] | None = None) -> list[Message]:
        """Returns a chat whose answer is `text`, until the end of the turn."""
        for filler in range(DISTANCE):
            last = {"role": "user", "content": "1" * filler}
            chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "-"}, last]
            prompt = self._tokenizer.apply_chat_template(
                chat, tools=tools, add_generation_prompt=True, tokenize=False
            )
            start = prompt.rindex(f"{text}<")
            encoded = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
            begins = [begin for begin, _ in encoded["offset_mapping"]]
            assert start in begins, "the text begins with a token"
            if len(begins) - begins.index(start) == DISTANCE:
                return chat
        raise AssertionError(f"{text!r} is too long")
