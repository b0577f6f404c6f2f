"""What tests of rows that get several tokens share."""

from __future__ import annotations

from typing import Any

from tests.contract.served import OUT_OF_MEMORY_TOKEN, PROMPT, VOCAB_SIZE, Served, Session
from tests.support.steps.batches import NewRow, WorkRow

OTHER = [80, 3, 3, 51, 29]
NUM_PROMPT = len(PROMPT)
BLOCKS = (3, 9, 1, 12, 7, 20)
# None of the tokens that make something go wrong.
HARMLESS = dict.fromkeys(range(OUT_OF_MEMORY_TOKEN, VOCAB_SIZE), -1000.0)


def prompt_row(**params: Any) -> NewRow:  # noqa: ANN401
    """Row 0, of PROMPT."""
    needs_history = {"repetition_penalty", "frequency_penalty"} & params.keys()
    history = PROMPT if needs_history else ()
    return NewRow(0, BLOCKS, NUM_PROMPT, params, seed=5, history=history)


async def one_by_one(session: Session, served: Served, num_tokens: int, **params: Any) -> list[int]:  # noqa: ANN401
    """The tokens of row 0 in as many steps, the first of which is 1."""
    batch = served.sender.batch
    work = [WorkRow(0, 0, PROMPT)]
    tokens = await session.tokens(batch(1, new=[prompt_row(**params)], work=work))
    for step_id in range(2, num_tokens + 1):
        work = [WorkRow(0, NUM_PROMPT + step_id - 2, back=1)]
        tokens += await session.tokens(batch(step_id, base=step_id - 1, work=work))
    return tokens
