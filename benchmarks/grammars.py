"""What grammars cost: to read a vocabulary, to compile, and in each step.

`compile`: JSON schemas of the tests, each for the first time, with the trial in another process and
without. `step`: rows with a JSON schema follow a token each, have their masks computed, and these
are applied to logits, as they are before a token is drawn. The tokens are byte pairs of Python's
own library; `vocab_size` is that of the model, which has as many or more.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.report import emit, percentile
from executor_service.grammars import CompiledGrammars, Vocabulary
from executor_service.sampling import SamplingRows, sample
from executor_service.steps import Grammar, ParamRows, SamplingParams, TokenMasks
from splitserve_grammars import MAX_COMPILE_CPU_S, PARSER_LIMITS, GrammarTrials
from splitserve_grammars.llguidance_text import grammar_text
from tests.support.grammars.json_schemas import SUPPORTED

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["person", "place", "thing"]},
        "address": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "since": {"type": "string", "format": "date-time"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
EOS = 0


def sources(num_bytes: int) -> Iterator[str]:
    """Texts of Python's library, some `num_bytes` of them."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if num_bytes <= 0:
            return
        text = path.read_text(errors="replace")
        num_bytes -= len(text)
        yield text


def read_vocabulary(vocab_size: int) -> Vocabulary:
    """Trains a tokenizer, and says how long it takes to read it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(200 * vocab_size), trainer)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        begin = time.perf_counter()
        vocabulary = Vocabulary.read(path, vocab_size, (EOS,))
    seconds = time.perf_counter() - begin
    num_tokens = tokenizer.get_vocab_size()
    emit("vocabulary", vocab_size=vocab_size, num_tokens=num_tokens, read_s=round(seconds, 2))
    return vocabulary


def time_compiling(vocabulary: Vocabulary, vocab_size: int) -> None:
    """The schemas of the tests, one by one."""
    tried_us, compiled_us = [], []
    trial = GrammarTrials()
    limits = LLParserLimits(**PARSER_LIMITS)
    trial.ask("regex", ("a",), MAX_COMPILE_CPU_S)  # starts the process
    for schema in SUPPORTED:
        begin = time.perf_counter()
        grammar = Grammar("json_schema", (json.dumps(schema),))
        error = trial.ask(grammar.kind, grammar.texts, MAX_COMPILE_CPU_S).error
        tried = time.perf_counter()
        text = grammar_text(grammar.kind, grammar.texts)
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        compiled_us.append((time.perf_counter() - tried) * 1e6)
        tried_us.append((time.perf_counter() - begin) * 1e6)
        assert not error, error
        assert not matcher.is_error(), matcher.get_error()
    trial.close()
    for name, values in (("compile_with_trial", tried_us), ("compile", compiled_us)):
        emit(
            name,
            vocab_size=vocab_size,
            num_schemas=len(values),
            p50_us=percentile(values, 50),
            p99_us=percentile(values, 99),
            max_us=percentile(values, 100),
        )


def time_steps(vocabulary: Vocabulary, vocab_size: int, num_rows: int, num_steps: int) -> None:
    """Rows that sample any allowed token, and begin anew when they have ended."""
    grammar = Grammar("json_schema", (json.dumps(SCHEMA),))
    grammars = CompiledGrammars(vocabulary, max_wait_s=60.0)
    generator = np.random.default_rng(0)
    params = ParamRows.of([SamplingParams(grammar=grammar)] * num_rows)
    positions, seeds = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int64)
    logits = torch.zeros(num_rows, vocab_size)
    rows, row_ids = np.arange(num_rows), np.arange(num_rows, dtype=np.int32)
    histories: list[list[int]] = [[EOS] for _ in range(num_rows)]
    masks_us, apply_us = [], []
    for step in range(-num_steps // 4, num_steps):
        for row, history in enumerate(histories):
            if history[-1] == EOS:
                histories[row] = [1]
                grammars.add(row, grammar, histories[row], 1)
        begin = time.perf_counter()
        masks = grammars.of_step(rows, row_ids).masks(rows)
        masked = time.perf_counter()
        sample(logits, SamplingRows(params, seeds, positions, positions, histories, masks), no_draw)
        applied = time.perf_counter()
        assert len(masks.rows) == num_rows or step < 0, masks.invalid
        _append(histories, masks, generator)
        if step >= 0:
            masks_us.append((masked - begin) * 1e6)
            apply_us.append((applied - masked) * 1e6)
    grammars.close()
    emit(
        "step",
        vocab_size=vocab_size,
        rows=num_rows,
        masks_p50_us=percentile(masks_us, 50),
        masks_p99_us=percentile(masks_us, 99),
        apply_p50_us=percentile(apply_us, 50),
        apply_p99_us=percentile(apply_us, 99),
    )


def no_draw(adjusted: torch.Tensor, _rows: SamplingRows) -> torch.Tensor:
    """Draws nothing."""
    return torch.zeros(len(adjusted), dtype=torch.int32)


def _append(
    histories: Sequence[list[int]],
    masks: TokenMasks,
    generator: np.random.Generator,
) -> None:
    for row, words in zip(masks.rows.tolist(), masks.words.view(np.uint8), strict=True):
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        histories[row].append(int(generator.choice(allowed)))


def main() -> None:
    """Measures each size of a vocabulary with each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    for vocab_size in arguments.vocab:
        vocabulary = read_vocabulary(vocab_size)
        time_compiling(vocabulary, vocab_size)
        for num_rows in arguments.rows:
            time_steps(vocabulary, vocab_size, num_rows, arguments.steps)


if __name__ == "__main__":
    main()
