"""What a grammar may cost."""

from __future__ import annotations

from typing import Any

MAX_GRAMMAR_BYTES = 65_536  # of UTF-8, all texts together: what the contract takes
MAX_CHOICES = 1024

# Processor time of a trial. The first one is short, so that nobody waits for long behind what is
# hard: schemas of 64 KiB take 30 to 150 ms.
FIRST_TRIAL_CPU_S = 0.1
MAX_COMPILE_CPU_S = 0.5
# A process that waits for a processor so long is given up, and the grammar tried in the next one.
MAX_TRIAL_WALL_S = 20.0
NUM_TRIES = 2
# Of the process of a trial: address space, with its stack. Rules that refer to each other are
# followed by recursion; a text of 64 KiB has some 6000 of them.
MAX_ADDRESS_BYTES = 1024**3
STACK_BYTES = 256 * 1024**2
# Of what is compiled, on the heap: schemas of 64 KiB take 5 MB.
MAX_COMPILED_BYTES = 16 * 1024**2

_MAX_LEXER_STATES = 12_000
# Keyword arguments of LLParserLimits. A mask takes up to 14 000 units of fuel in a millisecond. An
# ambiguous grammar has items for each way to read a text.
PARSER_LIMITS: dict[str, Any] = {
    "step_max_items": 2000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": _MAX_LEXER_STATES,
    "verbose_errors": False,
}
# What the lexer of a compiled grammar may grow to, with up to 1.1 KB for each state.
MAX_LEXER_BYTES = 1_100 * _MAX_LEXER_STATES
