"""A runner without a model: tokens follow from what is really stored in its KV pools.

Each slot holds a *chain*: a mix of the chain of the position before, the token and the position,
read through the block table as attention would. The chain before position 0 stands for the row's
adapter and for what its cross blocks hold. A wrong table, a lost copy, a block that was never
recomputed or belongs to another adapter changes the tokens; what can be recognised as corrupt is
listed in `violations` too. With a sliding window, nothing behind the window is read.

Shape letters: N blocks of a pool, B block size, R rows, W blocks of the longest table, P positions
that the longest table has room for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from executor_service.steps import (
    BlockMoves,
    BoolArray,
    CrossInput,
    FinishedStep,
    Grammar,
    Int32Array,
    Int64Array,
    RowStatus,
    StepInput,
    StepOutput,
    run_on,
)
from tests.support.fakes.fake_model import (
    WORD,
    UInt64Array,
    adapter_chain,
    allowed_by,
    attended,
    choose_allowed,
    encoder_start,
    expected_tokens,
    mix,
    mix_columns,
    prompt_scores,
    sampled_scores,
    token_of,
)

__all__ = ["FakeRunner", "StepFault", "expected_tokens", "mix", "no_fault"]

# What a slot holds that was never written.
POISON = -1


@dataclass(frozen=True, slots=True)
class StepFault:
    """Faults of a step. `error`: raised after the blocks were spoiled.

    `rows`: by row id, INVALID_LOGITS or FAILED; what such a row wrote is spoiled. `spoils_others`:
    so are the logits of rows that read it. `unsampled`: row ids whose grammar is being compiled.
    """

    error: Exception | None = None
    rows: Mapping[int, RowStatus] = field(default_factory=dict)
    spoils_others: bool = False
    unsampled: Collection[int] = ()


def no_fault(_step: StepInput) -> StepFault:
    """Returns no fault."""
    return StepFault()


def as_it_is(step: StepInput) -> StepInput:
    """Returns the step unchanged."""
    return step


class FakeRunner:
    """See the top of this file. `fault` is asked at the start of each step.

    `us_per_block`, `us_per_token`: made-up durations of block moves and of input tokens.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int = 0,
        vocab_size: int = 128,
        fault: Callable[[StepInput], StepFault] = no_fault,
        eos_token_ids: Collection[int] = (),
        sliding_window_tokens: int | None = None,
        us_per_block: int = 0,
        us_per_token: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        # How many tokens it knows to say; None for all.
        self.num_words: int | None = None
        self.fault = fault
        self.us_per_block = us_per_block
        self.us_per_token = us_per_token
        # What a step is that may bring several tokens: all it may be, unless a test wants less.
        self.cut: Callable[[StepInput], StepInput] = as_it_is
        self.violations: list[str] = []
        self.steps: list[int] = []
        self._block_size = block_size
        self._window = sliding_window_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        # [N, B, 2] int64: chain and token of each slot.
        self._device = np.full((num_device_blocks, block_size, 2), POISON, np.int64)
        self._host = np.full((num_host_blocks, block_size, 2), POISON, np.int64)

    @property
    def device_chains(self) -> Int64Array:
        """[N, B]; what the device blocks hold."""
        chains: Int64Array = self._device[:, :, 0]
        return chains

    @property
    def host_chains(self) -> Int64Array:
        """[N, B]; what the host blocks hold."""
        chains: Int64Array = self._host[:, :, 0]
        return chains

    def begin(self, step: StepInput) -> FinishedStep:
        return FinishedStep(self.execute(step))

    def execute(self, step: StepInput) -> StepOutput:
        """Runs `step` at once."""
        if step.num_run_on_tokens is None:
            return self._execute(step)
        output = run_on(self.cut(step), self._execute)
        self._forget_beyond(step, output)
        return output

    def _forget_beyond(self, step: StepInput, output: StepOutput) -> None:
        """Overwrites the slots that rows were allowed to write from their last token on."""
        assert output.runs is not None
        assert step.num_run_on_tokens is not None
        ends = step.num_computed_tokens + step.num_new_tokens
        num_more = step.num_run_on_tokens
        if step.drafts is not None:
            num_more = num_more + step.drafts.counts
        for row in np.flatnonzero(output.runs.counts).tolist():
            last = int(ends[row] + output.runs.counts[row]) - 1
            positions = np.arange(last, int(ends[row] + num_more[row]))
            blocks = step.block_tables[row, positions // self._block_size]
            self._device[blocks, positions % self._block_size] = POISON

    def _execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step.step_id)
        fault = self.fault(step)
        _move(self._device, self._host, step.swap_out)
        _move(self._host, self._device, step.swap_in)
        _move(self._device, self._device, step.copy)
        failed = [row for row, row_id in enumerate(step.row_ids.tolist()) if row_id in fault.rows]
        spoiled = range(step.num_rows) if fault.error else failed
        cross = encode_and_read(step, self._device, spoiled)
        starts = [
            adapter_chain(adapter_of(step, row)) ^ chain for row, chain in enumerate(cross.chains)
        ]
        self._write(step, starts, spoiled)
        if fault.error is not None:
            self._device[[*step.swap_in.destinations, *step.copy.destinations]] = POISON
            self._host[step.swap_out.destinations] = POISON
            raise fault.error
        for row, problem in cross.problems:
            self._violate(step, row, problem)
        self._verify(step, starts, _with_drafts_behind(step, failed))
        by_grammar = self._by_grammar(step)
        tokens = self._sample(step, cross.chains, by_grammar)
        statuses = np.full(step.num_rows, RowStatus.OK, np.uint8)
        statuses[step.samples & (tokens < 0)] = RowStatus.INVALID_LOGITS
        bad = {row: fault.rows[int(step.row_ids[row])] for row in failed}
        for row, allowed in by_grammar.items():
            if int(step.row_ids[row]) in fault.unsampled:
                bad.setdefault(row, RowStatus.NOT_SAMPLED)
            elif allowed is None:
                bad.setdefault(row, RowStatus.GRAMMAR_INVALID)
        for row, status in bad.items():
            statuses[row], tokens[row] = status, -1
        if fault.spoils_others:
            is_spoiled = self._reads_poison(step) & (statuses == RowStatus.OK)
            statuses[is_spoiled], tokens[is_spoiled] = RowStatus.INVALID_LOGITS, -1
        num_moved = sum(len(m.sources) for m in (step.swap_out, step.swap_in, step.copy))
        return StepOutput(
            row_statuses=statuses,
            sampled_token_ids=tokens,
            row_errors=dict.fromkeys(failed, "a fault that the test asked for"),
            logprobs=sampled_scores(step, tokens, self.vocab_size),
            prompt_logprobs=prompt_scores(
                step,
                self.vocab_size,
                lambda row, position: (
                    self._attend(step.block_tables[row], position + 1) ^ cross.chains[row]
                ),
            ),
            move_us=self.us_per_block * num_moved,
            forward_us=self.us_per_token * len(step.token_ids),
        )

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrites device blocks with poison."""
        self._device[list(block_ids)] = POISON

    def _write(self, step: StepInput, starts: Sequence[int], spoiled: Sequence[int]) -> None:
        """Writes all input tokens; `starts`: the chain before position 0 of each row.

        A row may lean on positions that another row of the step writes; those lie before its own,
        so rows are written in the order of their first position.
        """
        ends = np.cumsum(step.num_new_tokens).tolist()
        counts, firsts = step.num_new_tokens.tolist(), step.num_computed_tokens.tolist()
        token_ids, block_size, device = step.token_ids.tolist(), self._block_size, self._device
        for row in sorted(range(step.num_rows), key=firsts.__getitem__):
            position = firsts[row]
            table = step.block_tables[row].tolist()
            chain = starts[row]
            if position and self._window != 1:
                last = position - 1
                chain = int(device[table[last // block_size], last % block_size, 0])
            for token in token_ids[ends[row] - counts[row] : ends[row]]:
                chain = mix(starts[row] if self._window == 1 else chain, token, position)
                slot = (table[position // block_size], position % block_size)
                device[slot] = POISON if row in spoiled else (chain, token)
                position += 1

    def _verify(self, step: StepInput, starts: Sequence[int], failed: Sequence[int]) -> None:
        """Lists each row, but those in `failed`, that does not read what its tokens make."""
        if step.num_rows == 0:
            return
        slots = self._device[step.block_tables].reshape(step.num_rows, -1, 2)
        chains, is_read = slots[:, :, 0], self._is_read(step)
        is_wrong = chains != self._expected_chains(step, slots, starts).astype(np.int64)
        if self._window is not None:
            # What the first chain in the window leans on is out of sight.
            first = step.num_computed_tokens - self._window + 1
            is_first = np.arange(slots.shape[1]) == np.maximum(first, 0)[:, None]
            is_wrong = np.where(is_first & (first > 0)[:, None], chains == POISON, is_wrong)
        is_wrong |= np.repeat(step.block_tables < 0, self._block_size, axis=1)
        is_wrong &= is_read
        is_wrong[failed] = False
        for row in np.flatnonzero(is_wrong.any(axis=1)).tolist():
            position = int(is_wrong[row].argmax())
            block = int(step.block_tables[row, position // self._block_size])
            self._violate(step, row, f"reads something else at position {position}, block {block}")
        self._verify_histories(step)

    def _reads_poison(self, step: StepInput) -> BoolArray:
        """[R]; rows whose attention reads what was never written, or spoiled."""
        if step.num_rows == 0:
            return np.zeros(0, np.bool_)
        chains = self._device[step.block_tables, :, 0].reshape(step.num_rows, -1)
        is_poison: BoolArray = ((chains == POISON) & self._is_read(step)).any(axis=1)
        return is_poison

    def _is_read(self, step: StepInput) -> BoolArray:
        """[R, P]; the positions that a row's attention reads."""
        positions = np.arange(step.block_tables.shape[1] * self._block_size)
        ends = step.num_computed_tokens + step.num_new_tokens
        is_read = positions < ends[:, None]
        if self._window is not None:
            is_read &= positions > (step.num_computed_tokens - self._window)[:, None]
        return is_read

    def _expected_chains(
        self, step: StepInput, slots: Int64Array, starts: Sequence[int]
    ) -> UInt64Array:
        """[R, P]; what the chains must be, given those before them; `slots`: [R, P, 2]."""
        before = np.empty(slots.shape[:2], np.uint64)
        before[:] = np.array([start & WORD for start in starts], np.uint64)[:, None]
        if self._window != 1:
            before[:, 1:] = slots[:, :-1, 0].astype(np.uint64)
        positions = np.arange(slots.shape[1], dtype=np.uint64)
        return mix_columns(before, slots[:, :, 1].astype(np.uint64), positions)

    def _verify_histories(self, step: StepInput) -> None:
        token_ends = np.cumsum(step.num_new_tokens)
        ends = step.num_computed_tokens + step.num_new_tokens
        for row, history in enumerate(step.histories):
            if history is None:
                continue
            tokens = step.token_ids[token_ends[row] - step.num_new_tokens[row] : token_ends[row]]
            known = list(history[int(step.num_computed_tokens[row]) : int(ends[row])])
            if known != tokens.tolist():
                self._violate(step, row, f"has another history: {known}")

    def _violate(self, step: StepInput, row: int, problem: str) -> None:
        self.violations.append(f"step {step.step_id}: row {step.row_ids[row]} {problem}")

    def _by_grammar(self, step: StepInput) -> dict[int, frozenset[int] | None]:
        """Tokens that grammars allow, by row; None where the grammar is invalid."""
        allowed: dict[int, frozenset[int] | None] = {}
        for row in np.flatnonzero(step.samples).tolist():
            grammar = step.sampling_params[row].grammar
            if grammar is None:
                continue
            end = int(step.num_computed_tokens[row] + step.num_new_tokens[row])
            output = (step.histories[row] or ())[int(step.num_prompt_tokens[row]) : end]
            allowed[row] = allowed_by(grammar, output, self.vocab_size, self._eos_token_ids)
        return allowed

    def _sample(
        self,
        step: StepInput,
        crosses: Sequence[int],
        by_grammar: Mapping[int, Collection[int] | None],
    ) -> Int32Array:
        ends = (step.num_computed_tokens + step.num_new_tokens).tolist()
        seeds = step.seeds.tolist()
        tokens = np.full(step.num_rows, -1, np.int32)
        for row in np.flatnonzero(step.samples).tolist():
            seed = seeds[row] if step.sampling_params[row].temperature > 0 else 0
            read = self._attend(step.block_tables[row], ends[row]) ^ crosses[row]
            history = (step.histories[row] or ())[: ends[row]]
            token = token_of(mix(read, seed, ends[row]), self.vocab_size, self.num_words)
            params = step.sampling_params[row]
            allowed = by_grammar.get(row)
            tokens[row] = choose_allowed(token, params, history, self.vocab_size, allowed)
        return tokens

    def _attend(self, table: Int32Array, end: int) -> int:
        """Chains that the token at position `end` - 1 reads."""
        block_size = self._block_size
        if self._window is None:
            last = end - 1
            return int(self._device[table[last // block_size], last % block_size, 0])
        positions = np.arange(max(0, end - self._window), end)
        slots = self._device[table[positions // block_size], positions % block_size]
        return attended(slots[:, 0].tolist())


def _with_drafts_behind(step: StepInput, failed: Sequence[int]) -> list[int]:
    """`failed`, and the drafts of the same rows: these are whoever has the same block table."""
    tables = step.block_tables
    is_behind = (tables[:, None] == tables[None, list(failed)]).all(axis=2).any(axis=1)
    return np.flatnonzero(is_behind).tolist()


def _move(source: Int64Array, destination: Int64Array, moves: BlockMoves) -> None:
    if len(moves.sources):
        destination[moves.destinations] = source[moves.sources]


# -- cross blocks: each slot holds the chain of the encoder tokens up to it -----------------------


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
    for row, tokens in enumerate(cross.encoder_inputs):
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
    tokens = cross.encoder_inputs[row].tolist()
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


class SlowCompiler:
    """The `fault` of a FakeRunner in which the first `num_asks` rows for each grammar get no token.

    `num_asked`: how many rows that were.
    """

    def __init__(self, num_asks: int) -> None:
        self.num_asked = 0
        self._num_asks = num_asks
        self._asks_of = Counter[Grammar]()

    def __call__(self, step: StepInput) -> StepFault:
        waiting = []
        for row in np.flatnonzero(step.samples).tolist():
            grammar = step.sampling_params[row].grammar
            if grammar is not None and self._asks_of[grammar] < self._num_asks:
                self._asks_of[grammar] += 1
                waiting.append(int(step.row_ids[row]))
        self.num_asked += len(waiting)
        return StepFault(unsampled=waiting)


# Of so many rows and steps, the first half is cut short after none, one, and so on.
_NUM_DRAWN = 12


def cut_at_random(step: StepInput) -> StepInput:
    """Half of the rows run on as far as they may, the others less; so many drafts are kept.

    Of the same row in the same step it is the same each time.
    """
    assert step.num_run_on_tokens is not None
    row_ids = step.row_ids.tolist()
    drawn = np.array([mix(row_id, step.step_id, 0) % _NUM_DRAWN for row_id in row_ids])
    limits = np.where(drawn < _NUM_DRAWN // 2, drawn, 1000).astype(np.int32)
    num_run_on = np.minimum(step.num_run_on_tokens, limits)
    drafts = None if step.drafts is None else step.drafts.shortened(limits)
    return replace(step, num_run_on_tokens=num_run_on, drafts=drafts)
