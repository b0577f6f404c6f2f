"""Tests find what is wrong: each planted fault is found by the test that is named for it."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from tests.mutants.histories import DRAWS, num_until_wrong
from tests.mutants.mutant import HISTORIES, source_of
from tests.mutants.mutants import MUTANTS
from tests.mutants.run_mutant import FOUND
from tests.support.processes.forked import ROOT, run_patiently

# Chaos takes a minute, or as long as a client waits for what a planted fault withholds.
_PATIENCE_S = 3000.0


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_changes_the_code_that_there_is(name: str) -> None:
    mutant = MUTANTS[name]
    source = mutant.mutate(name, source_of(mutant.module))
    compile(source, mutant.module, "exec", dont_inherit=True)


@pytest.mark.parametrize("killer", sorted({mutant.killer for mutant in MUTANTS.values()}))
def test_killer_is_there(killer: str) -> None:
    if killer.startswith(HISTORIES):
        assert killer.removeprefix(HISTORIES) in DRAWS
    else:
        assert (ROOT / killer.partition("::")[0]).exists()


def _case(name: str) -> ParameterSet:
    """Chaos takes a minute; `make test` runs it without a fault."""
    is_chaos = MUTANTS[name].killer.startswith("tests/chaos")
    marks = [pytest.mark.thorough("those that take a second stay")] if is_chaos else []
    return pytest.param(name, marks=marks)


@pytest.mark.timeout(3600)
@pytest.mark.cases(6)
@pytest.mark.parametrize("name", [_case(name) for name in MUTANTS])
def test_fault_is_found_when_it_is_planted(name: str) -> None:
    ended = run_patiently(_PATIENCE_S, "tests.mutants.run_mutant", name)
    assert ended.returncode == FOUND, f"{MUTANTS[name].killer}:\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize("draw", DRAWS)
def test_histories_are_well_when_nothing_is_planted(draw: str) -> None:
    assert num_until_wrong(draw, range(2)) is None
