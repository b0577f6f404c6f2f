"""The cross blocks of a FakeRunner: each slot holds the chain of the encoder tokens up to it.

Shape letters: N device blocks, B block size, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from executor_service.steps.step import CrossInput, Int64Array, StepInput
from tests.support.fakes.fake_chain import encoder_start, mix

POISON = -1


@dataclass(frozen=True, slots=True)
class CrossReads:
    """`chains`: R long, what each row reads, 0 for none. `problems`: rows, and what is wrong."""

    chains: Sequence[int]
    problems: list[tuple[int, str]] = field(default_factory=list)


def adapter_of(step: StepInput, row: int) -> str:
    """Empty for none."""
    return step.adapters[row] if step.adapters else ""


def encode_and_read(step: StepInput, device: Int64Array, spoiled: Sequence[int]) -> CrossReads:
    """Writes the encoder tokens of `step` into `device` [N, B, 2], then reads what rows attend to.

    Rows in `spoiled` write poison.
    """
    cross = step.cross
    if cross is None:
        return CrossReads([0] * step.num_rows)
    problems: list[tuple[int, str]] = []
    encoded: set[int] = set()
    for row, tokens in enumerate(cross.encoder_token_ids):
        blocks = _encode(step, cross, row, device, row in spoiled)
        if not encoded.isdisjoint(blocks):
            problems.append((row, f"encodes into blocks {blocks}, which another row fills"))
        encoded.update(blocks if len(tokens) else ())
    chains = []
    for row in range(step.num_rows):
        chain, problem = _read(step, cross, row, device)
        chains.append(chain)
        if problem and row not in spoiled:
            problems.append((row, problem))
    return CrossReads(chains, problems)


def _encode(
    step: StepInput, cross: CrossInput, row: int, device: Int64Array, is_spoiled: bool
) -> list[int]:
    """Returns the blocks that the row fills."""
    block_size = device.shape[1]
    tokens = cross.encoder_token_ids[row].tolist()
    blocks: list[int] = cross.block_tables[row, : -(-len(tokens) // block_size)].tolist()
    chain = encoder_start(adapter_of(step, row))
    for position, token in enumerate(tokens):
        chain = mix(chain, token, position)
        slot = (blocks[position // block_size], position % block_size)
        device[slot] = POISON if is_spoiled else (chain, token)
    return blocks


def _read(step: StepInput, cross: CrossInput, row: int, device: Int64Array) -> tuple[int, str]:
    """The chain of the row's last encoder token, and what is wrong with those before it."""
    block_size, num_tokens = device.shape[1], int(cross.num_encoder_tokens[row])
    if num_tokens == 0:
        return 0, ""
    blocks = cross.block_tables[row, : -(-num_tokens // block_size)]
    slots = device[blocks].reshape(-1, 2)[:num_tokens].tolist()
    chain = encoder_start(adapter_of(step, row))
    for position, (stored, token) in enumerate(slots):
        chain = mix(chain, token, position)
        if stored != chain:
            where = f"encoder position {position}, block {blocks[position // block_size]}"
            return int(slots[-1][0]), f"reads something else at {where}"
    return chain, ""
