"""Whoever asks a process about a grammar goes on, whatever that process does."""

from __future__ import annotations

import sys
import threading
from contextlib import closing

import pytest

from splitserve_grammars.trial import MAX_LINE_BYTES, GrammarTrials, TrialUnavailable
from tests.support.processes.patience import PATIENCE_S

# More than a pipe holds.
LARGE = "x" * 1_000_000


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 100000",  # it reads nothing
        "exec cat > /dev/null",  # it says nothing
        "printf [; exec cat > /dev/null",  # it does not end what it says
    ],
)
def test_process_is_given_up_when_it_stalls(script: str) -> None:
    trials = GrammarTrials(["sh", "-c", script], max_wall_s=0.3)
    raised: list[Exception] = []

    def ask() -> None:
        try:
            trials.ask("regex", [LARGE], 1.0)
        except TrialUnavailable as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(PATIENCE_S)
    is_stuck = asking.is_alive()
    trials.close()
    asking.join()
    assert not is_stuck
    assert len(raised) == 1


def test_process_is_given_up_when_it_says_too_much() -> None:
    script = f"print('[\"\", \"\", 1' + ' ' * {MAX_LINE_BYTES} + ']', flush=True); input()"
    trials = GrammarTrials([sys.executable, "-c", script], PATIENCE_S)
    with closing(trials), pytest.raises(TrialUnavailable):
        trials.ask("regex", ["a"], 1.0)
