"""All mutants, by what their fault is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tests.mutants.bench_mutants import BENCH_MUTANTS
from tests.mutants.core_mutants import CORE_MUTANTS
from tests.mutants.mutant import HISTORIES, Mutant
from tests.mutants.rule_mutants import RULE_MUTANTS
from tests.mutants.service_mutants import EXECUTOR_MUTANTS, SERVICE_MUTANTS

# Faults that a test of the core finds, and random histories must find as well.
_FOUND_BY_HISTORIES_TOO = (
    "an evacuated second sequence of whole blocks loses its last token",
    "a resumed sequence of more than 48 tokens loses one",
)

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {
        **CORE_MUTANTS,
        **{
            f"{name}, in a history": replace(
                CORE_MUTANTS[name], killer=f"{HISTORIES}random_scenario"
            )
            for name in _FOUND_BY_HISTORIES_TOO
        },
        **RULE_MUTANTS,
        **EXECUTOR_MUTANTS,
        **SERVICE_MUTANTS,
        **BENCH_MUTANTS,
    }
)
