"""What the answer to a chat may look like, and who tells its parts apart."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve_gateway.parsing.output_format import OutputFormat
from splitserve_gateway.parsing.output_parser import OutputParser, ParserOptions


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers to one chat are read. `shows_markers`: special tokens stay in the text."""

    output_format: OutputFormat
    options: ParserOptions
    shows_markers: bool = False

    def new_parser(self) -> OutputParser:
        """For one choice."""
        return OutputParser(self.output_format, self.options)
