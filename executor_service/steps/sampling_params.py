"""Sampling parameters of one row and of many, token constraints, and interfaces of grammars.

Parameters of many rows are columns, so that no step loops over them. Shape letters: R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from executor_service.steps.pooling import PoolingParams
from splitserve_contract import DRAW_PARAMETERS, SamplingValues

_Int32s = npt.NDArray[np.int32]
_Float32s = npt.NDArray[np.float32]
_Indexes = npt.NDArray[np.integer[Any]]

_NONE = -1
_NO_TOKENS = np.empty(0, np.int32)
_NO_BIASES = np.empty(0, np.float32)
# Parameters that are columns of the rows; None is -1 in them.
_numbers_of = attrgetter(*(p.name for p in DRAW_PARAMETERS), "num_logprobs", "num_prompt_logprobs")
_COLUMNS = np.dtype(
    [
        *((parameter.name, parameter.column) for parameter in DRAW_PARAMETERS),
        ("num_logprobs", np.int32),
        ("num_prompt_logprobs", np.int32),
        ("adjusts_logits", np.bool_),
        ("reads_output", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of the output text: its kind in the contract, and its text or the choices."""

    kind: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TranscriptionRules:
    """Rules for the output of a speech model; see `TranscriptionRules` in the proto."""

    first_suppressed_token_ids: tuple[int, ...] = ()
    first_timestamp_token_id: int | None = None
    first_special_token_id: int = 0
    max_first_timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingValues):
    """Parameters for choosing a token; meaning and order of application as in `executor.proto`."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    stop_token_ids: frozenset[int] = frozenset()
    transcription: TranscriptionRules | None = None
    pooling: PoolingParams | None = None
    constraints: TokenConstraints | None = field(init=False, repr=False, compare=False)
    biased_token_ids: _Int32s = field(init=False, repr=False, compare=False)
    biases: _Float32s = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepares values that each step would compute again; `logit_bias` sorted by token id."""
        constraints = TokenConstraints.of(self.allowed_token_ids, self.bad_words_token_ids)
        object.__setattr__(self, "constraints", constraints)
        token_ids, biases = _NO_TOKENS, _NO_BIASES
        if self.logit_bias:
            token_ids = np.array(sorted(self.logit_bias), np.int32)
            biases = np.array([self.logit_bias[t] for t in token_ids.tolist()], np.float32)
        object.__setattr__(self, "biased_token_ids", token_ids)
        object.__setattr__(self, "biases", biases)

    @property
    def needs_history(self) -> bool:
        """Whether the executor must know the tokens of the sequence."""
        return (
            self.uses_penalties
            or self.num_prompt_logprobs is not None
            or self.has_phrases
            or self.grammar is not None
            or self.has_timestamps
        )

    @property
    def has_timestamps(self) -> bool:
        """Whether a speech model samples timestamps."""
        rules = self.transcription
        return rules is not None and rules.first_timestamp_token_id is not None

    @property
    def has_phrases(self) -> bool:
        """Whether there are bad words of several tokens."""
        return self.constraints is not None and bool(self.constraints.phrases)

    @property
    def reads_output(self) -> bool:
        """Whether the host must know the latest sampled token to tell the allowed next ones."""
        return self.has_phrases or self.grammar is not None or self.has_timestamps


@dataclass(frozen=True, slots=True)
class ParamRows:
    """Parameters of R rows: one SamplingParams each, and columns [R] of the common values."""

    objects: npt.NDArray[np.object_]
    columns: npt.NDArray[np.void]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> ParamRows:
        """Returns the rows with `params`, one set per row."""
        rows = cls.empty(len(params))
        for row, row_params in enumerate(params):
            rows.objects[row] = row_params
            rows.columns[row] = _record(row_params)
        return rows

    @classmethod
    def empty(cls, num_rows: int) -> ParamRows:
        """Returns `num_rows` rows without parameters."""
        return cls(np.empty(num_rows, np.object_), np.zeros(num_rows, _COLUMNS))

    def __len__(self) -> int:
        """Number of rows, R."""
        return len(self.objects)

    def __getitem__(self, row: int) -> SamplingParams:
        """Returns the parameters of one row."""
        params: SamplingParams = self.objects[row]
        return params

    def take(self, rows: _Indexes) -> ParamRows:
        """Returns the parameters of `rows`, given as indexes."""
        return ParamRows(self.objects.take(rows), self.columns.take(rows))

    def put(self, rows: _Indexes, params: ParamRows) -> None:
        """Overwrites the parameters of `rows`."""
        self.objects[rows] = params.objects
        self.columns[rows] = params.columns

    def forget(self, rows: _Indexes) -> None:
        """Removes the parameters of `rows`."""
        self.objects[rows] = None

    @property
    def temperatures(self) -> _Float32s:
        """Temperature of each row, [R]."""
        return self.columns["temperature"].copy()

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns the values of one of `DRAW_PARAMETERS`, [R]; the default for no limit."""
        return self.columns[name].copy()

    def top_k(self, vocab_size: int) -> _Int32s:
        """Returns the top_k of each row, [R], at most `vocab_size`, which stands for no limit."""
        top_k = self.columns["top_k"]
        limits: _Int32s = np.where(top_k == _NONE, vocab_size, np.minimum(top_k, vocab_size))
        return limits.astype(np.int32, copy=False)

    @property
    def num_logprobs(self) -> _Int32s:
        """Number of logprobs of each row, [R]; -1 where none are asked for."""
        return self.columns["num_logprobs"].copy()

    @property
    def num_prompt_logprobs(self) -> _Int32s:
        """Number of prompt logprobs of each row, [R]; -1 where none are asked for."""
        return self.columns["num_prompt_logprobs"].copy()

    @property
    def adjusts_logits(self) -> npt.NDArray[np.bool_]:
        """Whether logits of a row are masked, biased or penalised before temperature; [R]."""
        return self.columns["adjusts_logits"].copy()

    @property
    def reads_output(self) -> npt.NDArray[np.bool_]:
        """Whether the host must know the latest sampled token of a row; [R]."""
        return self.columns["reads_output"].copy()


def _record(params: SamplingParams) -> tuple[object, ...]:
    """Returns the values of one row in the order of _COLUMNS."""
    adjusts = (
        bool(params.suppressed_token_ids or params.logit_bias)
        or params.constraints is not None
        or params.grammar is not None
        or params.transcription is not None
        or params.uses_penalties
    )
    numbers = [_NONE if number is None else number for number in _numbers_of(params)]
    return (*numbers, adjusts, params.reads_output)


# -- Token constraints, prepared once for all steps of a row ---------------------------------------
#
# Shape letters: V tokens of the vocabulary.


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """Compiled form of `allowed_token_ids` and `bad_words_token_ids` of a row.

    `allowed`: None for all tokens. `forbidden`: the bad words of one token. `phrases`: the longer
    bad words, by their second to last token; each has the tokens before that one, and the last
    token, which is the one to forbid.
    """

    allowed: npt.NDArray[np.int64] | None
    forbidden: npt.NDArray[np.int64]
    phrases: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]

    @classmethod
    def of(
        cls, allowed_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> TokenConstraints | None:
        """Returns the constraints, None for none. Batch checks refuse an empty bad word."""
        if not allowed_token_ids and not bad_words:
            return None
        phrases: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for tokens in bad_words:
            if len(tokens) > 1:
                phrases.setdefault(tokens[-2], []).append((tuple(tokens[:-2]), tokens[-1]))
        single = [tokens[0] for tokens in bad_words if len(tokens) == 1]
        return cls(
            np.array(allowed_token_ids, np.int64) if allowed_token_ids else None,
            np.array(single, np.int64),
            phrases,
        )

    def blocked(self, vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """Returns a mask [V] of the tokens that are never allowed, None if all are."""
        if self.allowed is None and not len(self.forbidden):
            return None
        blocked = np.full(vocab_size, self.allowed is not None)
        if self.allowed is not None:
            blocked[self.allowed] = False
        blocked[self.forbidden] = True
        return blocked

    def forbidden_after(self, history: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the tokens that would complete a bad word after `num_tokens` tokens of `history`.

        `history` is a list, or a sequence with equally fast indexing: the method reads a few
        elements and copies nothing.
        """
        last = num_tokens - 1
        if last < 0:
            return []
        return [
            token_id
            for before, token_id in self.phrases.get(int(history[last]), ())
            if len(before) <= last and tuple(history[last - len(before) : last]) == before
        ]


# -- Interfaces of grammars ------------------------------------------------------------------------
#
# Steps see token masks only. Compiling and following grammars is elsewhere.
#
# Shape letters: G rows with a mask, V tokens of the vocabulary, W words of a mask, 32 W >= V.


_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Allowed tokens of the rows of a step that have a grammar and sample.

    Rows are named by their indexes among all rows of the step that sample. `rows`: [G] int64,
    rising. `words`: [G, W] int32; bit t % 32, from the lowest, of word t // 32 says whether token t
    is allowed. `pending`: rows whose grammar is not compiled yet, or does not match the row's
    position yet; `lost`: the pending rows that have sampled before, and have to be added anew.
    `invalid`: rows that have no next token, and the reason.
    """

    rows: _Int64s
    words: _Int32s
    pending: Sequence[int]
    invalid: Mapping[int, str]
    lost: Sequence[int] = ()

    def part(self, rows: slice) -> TokenMasks:
        """Returns the masks of the slice `rows`, with indexes counted from its start."""
        start, end = np.searchsorted(self.rows, (rows.start, rows.stop)).tolist()
        return TokenMasks(self.rows[start:end] - rows.start, self.words[start:end], (), {})


class StepGrammars(Protocol):
    """Grammars of the rows of one step."""

    def masks(self, sampling_rows: _Int64s) -> TokenMasks:
        """Returns the token masks of `sampling_rows` [S], rising indexes of the rows that sample.

        If no row can sample yet, waits for a moment. Raises nothing.
        """
        ...

    def take(self, rows: _Int64s) -> StepGrammars:
        """Returns the grammars of a step that has only `rows`, in this order."""
        ...

    def drafted(self, rows: _Int64s, histories: Sequence[Sequence[int] | None]) -> StepGrammars:
        """Returns the grammars of a step of `rows`, some repeated, each after its whole history.

        Tokens that such a history has beyond the row's own one are draft tokens and may be wrong.
        """
        ...


class RowGrammars(Protocol):
    """Grammars of all rows of an executor, by row id."""

    def add(
        self, row_id: int, grammar: Grammar, history: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Starts compiling. `history`: all tokens of the row; the caller appends to it."""
        ...

    def remove(self, row_ids: _Int32s) -> None:
        """Removes rows, with a grammar or without."""
        ...

    def of_step(self, rows: _Int64s, row_ids: _Int32s) -> StepGrammars:
        """Returns the grammars of a step.

        `rows`: rising indexes of the rows of the step that have a grammar; `row_ids`: the ids of
        these rows.
        """
        ...
