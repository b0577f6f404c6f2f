"""Whatever happens to a fleet, a replay of its journal decides the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scheduler_service.journal import FileJournal, NoJournal, replay
from scheduler_service.scheduler.queue import QUEUE_POLICIES
from scheduler_service.scheduler.values import BatchPolicyName, PreemptionMode, Speculation
from tests.support.core.recorded_run import RandomRun, run_config

OPTIONS = st.fixed_dictionaries(
    {
        "queue_policy": st.sampled_from(list(QUEUE_POLICIES)),
        "batch_policy": st.sampled_from(BatchPolicyName),
        "preemption_mode": st.sampled_from(PreemptionMode),
        "sliding_window": st.sampled_from([None, None, 13]),
        "num_device_blocks": st.sampled_from([20, 24, 60]),
        "num_host_blocks": st.sampled_from([0, 16]),
        "prefix_caching": st.booleans(),
        "num_lookahead_slots": st.sampled_from([0, 3]),
        "max_run_ahead": st.sampled_from([1, 4]),
        "speculation": st.sampled_from(Speculation),
        "delay_factor": st.sampled_from([0.0, 0.5]),
        "tenant_weights": st.sampled_from([{}, {"a": 2.0, "b": 0.3}]),
    }
)
several = settings(
    max_examples=int(os.environ.get("SPLITSERVE_TEST_EXAMPLES", "6")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@several
@given(
    seed=st.integers(0, 2**32),
    num_turns=st.integers(1, 100),
    num_executors=st.integers(1, 4),
    max_bytes=st.sampled_from([2**26, 600_000]),
    disturbed_ratio=st.sampled_from([0.02, 0.1]),
    options=OPTIONS,
)
def test_replay_is_identical_when_anything_happens(
    seed: int,
    num_turns: int,
    num_executors: int,
    max_bytes: int,
    disturbed_ratio: float,
    options: dict[str, object],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = FileJournal(Path(folder) / "scheduler.journal", max_bytes)
        run = RandomRun(
            journal,
            run_config(**options),
            seed,
            num_executors=num_executors,
            disturbed_ratio=disturbed_ratio,
        )
        run.run(num_turns)
        journal.close()

        files = list(Path(folder).iterdir())
        assert sum(file.stat().st_size for file in files) <= max_bytes
        reports = [replay(file) for file in files]
        assert [report.difference for report in reports] == [None] * len(reports)
        # What was recorded went well: all requests have ended.
        assert not run.scheduler.locations


# Metrics are asked for while an executor drains: routing must not forget the executor by that.
@example(2300, 14, {"prefix_caching": False, "num_device_blocks": 20, "num_host_blocks": 0})
@several
@given(seed=st.integers(0, 2**32), num_turns=st.integers(1, 60), options=OPTIONS)
def test_journal_is_the_same_when_somebody_watches(
    seed: int, num_turns: int, options: dict[str, object]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journals = []
        for is_watched in (False, True):
            path = Path(folder) / f"{is_watched}.journal"
            journal = FileJournal(path, 2**26)
            RandomRun(journal, run_config(**options), seed, is_watched=is_watched).run(num_turns)
            journal.close()
            journals.append(path.read_bytes())
        assert journals[0] == journals[1]


@pytest.mark.parametrize(
    ("seed", "num_turns", "fleet", "options"),
    [
        # The first of several suspects was preempted, and the first that runs lacks a block.
        (9, 150, {}, {"queue_policy": "priority"}),
        # The first of several suspects ends when it has its turn, as its deadline is past.
        (
            1117,
            100,
            {},
            {
                "queue_policy": "deadline",
                "preemption_mode": PreemptionMode.RECOMPUTE,
                "num_device_blocks": 60,
                "max_run_ahead": 4,
            },
        ),
        # A request is swapped out for a trial, and in again before the trial has its blocks.
        (
            413,
            100,
            {"num_executors": 4},
            {
                "queue_policy": "fair",
                "num_device_blocks": 20,
                "max_run_ahead": 4,
                "speculation": Speculation.PROMPT_LOOKUP,
                "delay_factor": 0.5,
            },
        ),
        # A request is preempted for one behind the protected one, and comes back before both.
        (
            485,
            100,
            {"disturbed_ratio": 0.02},
            {
                "queue_policy": "priority",
                "num_device_blocks": 20,
                "prefix_caching": False,
                "num_lookahead_slots": 3,
                "max_run_ahead": 4,
                "speculation": Speculation.PROMPT_LOOKUP,
                "delay_factor": 0.5,
            },
        ),
    ],
)
def test_all_requests_end_when_they_wait_for_each_other(
    seed: int, num_turns: int, fleet: dict[str, Any], options: dict[str, object]
) -> None:
    run = RandomRun(NoJournal(), run_config(**options), seed, **fleet)
    run.run(num_turns)

    assert not run.scheduler.locations
