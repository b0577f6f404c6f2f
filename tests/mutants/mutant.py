"""Mutants: faults planted into our code one at a time, each with the test that must find it.

Nothing of ours that a mutant may change is imported here: a fault is planted before that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

HISTORIES = "histories of "


class StaleMutant(Exception):
    """The code that a mutant changes is another by now: the mutant must be renewed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: in the source of `module` the text `old`, which is there once, becomes `new`.

    `killer`: the node id of the test that must fail because of it; or HISTORIES and the name of a
    draw of `histories.DRAWS`, of which one of the first histories must have a problem.
    """

    module: str
    old: str
    new: str
    killer: str

    def mutate(self, name: str, source: str) -> str:
        """The source of the module with the fault. Raises StaleMutant."""
        count = source.count(self.old)
        if count != 1:
            raise StaleMutant(
                f"mutant {name!r} must be renewed: {self.module} has the text it replaces "
                f"{count} times; allowed: once\n{self.old}"
            )
        return source.replace(self.old, self.new)


class _MutatedSource(SourceFileLoader):
    """Loads a module as if its source were another. Nothing is written to the disk."""

    source = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Planting(MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        loader = _MutatedSource(fullname, spec.origin)
        loader.source = self._source
        spec.loader = loader
        return spec


def plant(name: str, mutant: Mutant) -> None:
    """Plants the fault into this process, for good. Its module must not have been imported yet.

    Raises StaleMutant.
    """
    assert mutant.module not in sys.modules, f"{mutant.module} was imported before"
    source = mutant.mutate(name, source_of(mutant.module))
    sys.meta_path.insert(0, _Planting(mutant.module, source))


def source_of(module: str) -> str:
    """The source as it lies on the disk; imports nothing."""
    part = f"{module.replace('.', '/')}.py"
    return next(path for folder in sys.path if (path := Path(folder, part)).exists()).read_text()
