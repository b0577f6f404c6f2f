"""All mutants, by what their fault is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.core_mutants import CORE_MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.service_mutants import EXECUTOR_MUTANTS, SERVICE_MUTANTS

MUTANTS: Mapping[str, Mutant] = MappingProxyType(
    {**CORE_MUTANTS, **EXECUTOR_MUTANTS, **SERVICE_MUTANTS}
)


def table() -> str:
    """All of them as a table of Markdown, for people."""
    rows = (
        f"| {name} | `{mutant.module}` | `{mutant.killer}` |\n" for name, mutant in MUTANTS.items()
    )
    return "".join(("| fault | planted in | found by |\n", "|---|---|---|\n", *rows))
