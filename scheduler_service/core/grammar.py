"""What the text of an output must be, as the client said it; only executors can compile it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from splitserve_rpc.domain_error import DomainError

GrammarKind = Literal["json_schema", "regex", "lark", "choices"]

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class Grammar:
    """A kind of the contract and its text; of "choices", all texts to choose from."""

    kind: GrammarKind
    texts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of all texts, in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    def validate(self) -> None:
        """Raises DomainError(SAMPLING_PARAMS_INVALID) naming what is too large, or empty."""
        check_num_texts(len(self.texts))
        name = f"grammar.{self.kind}"
        if "" in self.texts:
            raise _invalid(f"{name} has an empty text; allowed: 1 byte or more")
        if (num_bytes := self.num_bytes) > MAX_GRAMMAR_BYTES:
            raise _invalid(f"{name} has {num_bytes} bytes; allowed: at most {MAX_GRAMMAR_BYTES}")


def check_num_texts(num_texts: int) -> None:
    """Raises DomainError if there is nothing to choose from, or too much; other kinds have one."""
    if not 1 <= num_texts <= MAX_CHOICES:
        raise _invalid(f"grammar.choices has {num_texts} texts; allowed: 1 to {MAX_CHOICES}")


def _invalid(message: str) -> DomainError:
    return DomainError("SAMPLING_PARAMS_INVALID", message)
