"""A runner without a model: tokens follow from what is really stored in its KV pools.

Each slot holds a *chain*: a mix of the chain of the position before, the token and the position,
read through the block table as attention would. A wrong table, a lost copy, a block that was never
recomputed changes the tokens; what can be recognised as corrupt is listed in `violations` too.

Shape letters: N blocks of a pool, B block size, R rows, W blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor_service.step import (
    BlockMoves,
    Int32Array,
    Int64Array,
    RowStatus,
    StepInput,
    StepOutput,
)
from tests.support.fake_logprobs import prompt_scores, sampled_scores

_POISON = -1
_WORD = 2**64 - 1
_CHAIN = 2**62 - 1
_TOKEN_FACTOR = 0x9E3779B97F4A7C15
_POSITION_FACTOR = 0xC2B2AE3D27D4EB4F
_FACTOR = 0xD6E8FEB86659FD93

UInt64Array = npt.NDArray[np.uint64]


def mix(chain: int, token: int, position: int) -> int:
    """The chain after `token` at `position`; 0 .. 2^62 - 1."""
    word = (chain ^ (token * _TOKEN_FACTOR + position * _POSITION_FACTOR)) & _WORD
    word = (word * _FACTOR) & _WORD
    return (word ^ (word >> 29)) & _CHAIN


def _mix_columns(chains: UInt64Array, tokens: UInt64Array, positions: UInt64Array) -> UInt64Array:
    """`mix` of whole arrays."""
    words = chains ^ (tokens * np.uint64(_TOKEN_FACTOR) + positions * np.uint64(_POSITION_FACTOR))
    words = words * np.uint64(_FACTOR)
    return (words ^ (words >> np.uint64(29))) & np.uint64(_CHAIN)


def expected_tokens(
    prompt: Sequence[int], num_tokens: int, seed: int, vocab_size: int
) -> list[int]:
    """The first `num_tokens` tokens a FakeRunner samples after `prompt`; `seed` 0 for greedy."""
    chain = 0
    for position, token in enumerate(prompt):
        chain = mix(chain, token, position)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + num_tokens):
        tokens.append(mix(chain, seed, position) % vocab_size)
        chain = mix(chain, tokens[-1], position)
    return tokens


@dataclass(frozen=True, slots=True)
class StepFault:
    """What goes wrong in a step. `error`: raised after the blocks were spoiled.

    `rows`: by row id, INVALID_LOGITS or FAILED; what such a row wrote is spoiled.
    """

    error: Exception | None = None
    rows: Mapping[int, RowStatus] = field(default_factory=dict)


def no_fault(_step: StepInput) -> StepFault:
    """All goes well."""
    return StepFault()


class FakeRunner:
    """See the top of this file. `fault` is asked at the start of each step."""

    def __init__(
        self,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        vocab_size: int = 128,
        fault: Callable[[StepInput], StepFault] = no_fault,
    ) -> None:
        self.vocab_size = vocab_size
        self.fault = fault
        self.violations: list[str] = []
        self.steps: list[int] = []
        self._block_size = block_size
        # [N, B, 2] int64: chain and token of each slot.
        self._device = np.full((num_device_blocks, block_size, 2), _POISON, np.int64)
        self._host = np.full((num_host_blocks, block_size, 2), _POISON, np.int64)

    def execute(self, step: StepInput) -> StepOutput:
        """See Runner."""
        self.steps.append(step.step_id)
        fault = self.fault(step)
        _move(self._device, self._host, step.swap_out)
        _move(self._host, self._device, step.swap_in)
        _move(self._device, self._device, step.copy)
        failed = [row for row, row_id in enumerate(step.row_ids.tolist()) if row_id in fault.rows]
        chains = self._write(step, range(step.num_rows) if fault.error else failed)
        if fault.error is not None:
            raise fault.error
        self._verify(step, failed)
        tokens = self._sample(step, chains)
        statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
        for row in failed:
            statuses[row] = fault.rows[int(step.row_ids[row])]
            tokens[row] = -1
        return StepOutput(
            row_statuses=statuses,
            sampled_token_ids=tokens,
            row_errors=dict.fromkeys(failed, "a fault that the test asked for"),
            logprobs=sampled_scores(step, tokens, self.vocab_size),
            prompt_logprobs=prompt_scores(step, self.vocab_size),
        )

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrites device blocks with poison."""
        self._device[list(block_ids)] = _POISON

    def _write(self, step: StepInput, spoiled: Sequence[int]) -> list[int]:
        """Writes all input tokens; returns the chain of the last one of each row.

        A row may lean on positions that another row of the step writes; those lie before its own,
        so rows are written in the order of their first position.
        """
        ends = np.cumsum(step.num_new_tokens).tolist()
        counts, starts = step.num_new_tokens.tolist(), step.num_computed_tokens.tolist()
        token_ids, block_size, device = step.token_ids.tolist(), self._block_size, self._device
        chains = [0] * step.num_rows
        for row in sorted(range(step.num_rows), key=starts.__getitem__):
            position = starts[row]
            table = step.block_tables[row].tolist()
            chain = 0
            if position:
                last = position - 1
                chain = int(device[table[last // block_size], last % block_size, 0])
            for token in token_ids[ends[row] - counts[row] : ends[row]]:
                chain = mix(chain, token, position)
                slot = (table[position // block_size], position % block_size)
                device[slot] = _POISON if row in spoiled else (chain, token)
                position += 1
            chains[row] = chain
        return chains

    def _verify(self, step: StepInput, failed: Sequence[int]) -> None:
        """Lists each row, but those in `failed`, that does not read what its tokens make."""
        if step.num_rows == 0:
            return
        ends = step.num_computed_tokens + step.num_new_tokens
        slots = self._device[step.block_tables].reshape(step.num_rows, -1, 2)
        positions = np.arange(slots.shape[1], dtype=np.uint64)
        chains = slots[:, :, 0].astype(np.uint64)
        before = np.zeros_like(chains)
        before[:, 1:] = chains[:, :-1]
        expected = _mix_columns(before, slots[:, :, 1].astype(np.uint64), positions)
        is_wrong = (chains != expected) & (positions < ends[:, None])
        is_wrong[failed] = False
        for row in np.flatnonzero(is_wrong.any(axis=1)).tolist():
            position = int(is_wrong[row].argmax())
            block = int(step.block_tables[row, position // self._block_size])
            self.violations.append(
                f"step {step.step_id}: row {step.row_ids[row]} reads something else at position"
                f" {position}, block {block}"
            )
        self._verify_histories(step, ends)

    def _verify_histories(self, step: StepInput, ends: Int32Array) -> None:
        token_ends = np.cumsum(step.num_new_tokens)
        for row, history in enumerate(step.histories):
            if history is None:
                continue
            tokens = step.token_ids[token_ends[row] - step.num_new_tokens[row] : token_ends[row]]
            known = list(history[int(step.num_computed_tokens[row]) : int(ends[row])])
            if known != tokens.tolist():
                self.violations.append(
                    f"step {step.step_id}: row {step.row_ids[row]} has another history: {known}"
                )

    def _sample(self, step: StepInput, chains: Sequence[int]) -> Int32Array:
        positions = (step.num_computed_tokens + step.num_new_tokens).tolist()
        seeds = step.seeds.tolist()
        tokens = np.full(step.num_rows, -1, np.int32)
        for row in np.flatnonzero(step.samples).tolist():
            seed = seeds[row] if step.sampling_params[row].temperature > 0 else 0
            tokens[row] = mix(chains[row], seed, positions[row]) % self.vocab_size
        return tokens


def _move(source: Int64Array, destination: Int64Array, moves: BlockMoves) -> None:
    if len(moves.sources):
        destination[moves.destinations] = source[moves.sources]
