"""Drives a runner whose rows may run on: random chunks of prompts, random permissions, shared
prefixes and rows that are taken over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor_service.steps.step import Runner, execute_step
from tests.support.steps.step_driver import DrivenSequence, make_step, next_row


def run(
    runner: Runner, sequences: Sequence[DrivenSequence], rng: random.Random, most: int = 8
) -> None:
    """Runs all to their ends; in each step some of them, a part of a prompt or up to `most` + 1."""
    step_id = 0
    while unfinished := [(i, each) for i, each in enumerate(sequences) if each.num_left > 0]:
        chosen = [pair for pair in unfinished if rng.random() < 0.8] or unfinished[:1]
        step_id += 1
        rows, permitted = [], []
        for _, each in chosen:
            pending = each.tokens[each.num_computed :]
            chunk = pending[: rng.randint(1, len(pending))] if len(pending) > 1 else pending
            is_whole = len(chunk) == len(pending)
            rows.append(replace(next_row(each, None), tokens=chunk, samples=is_whole))
            permitted.append(min(rng.randint(0, most), each.num_left - 1) if is_whole else 0)
        step = make_step(rows, step_id=step_id)
        step = replace(step, row_ids=np.array([index for index, _ in chosen], np.int32))
        if any(permitted):
            step = replace(step, num_run_on_tokens=np.array(permitted, np.int32))
        output = execute_step(runner, step)
        for index, (_, each) in enumerate(chosen):
            tokens = output.token_ids_of(index)
            assert bool(tokens) == rows[index].samples
            assert len(tokens) <= permitted[index] + 1
            each.num_computed += len(rows[index].tokens) + max(0, len(tokens) - 1)
            each.output += tokens
