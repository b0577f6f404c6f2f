"""What a grammar may cost."""

from __future__ import annotations

from typing import Any

# Of a text that compiles, in seconds of processor time and bytes of address space.
MAX_COMPILE_CPU_S = 3
MAX_COMPILE_BYTES = 2 * 1024**3
# Rules that refer to each other are followed by recursion; a text of 64 KiB has some 6000 of them.
STACK_BYTES = 256 * 1024**2
# Keyword arguments of LLParserLimits. A mask takes up to 14 000 units of fuel in a millisecond, a
# state of a lexer has 1 to 2 KB. An ambiguous grammar has items for each way to read a text.
PARSER_LIMITS: dict[str, Any] = {
    "step_max_items": 2000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
