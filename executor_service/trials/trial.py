"""Trial of code before it serves: its results are compared with those of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from executor_service.errors import TrialFailed, one_line

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Trial(Generic[Case, Result]):
    """Comparison of a candidate with its reference, case by case.

    `error_of`: returns the error of a result, given the case, the expected result and the actual
    one. It raises TrialFailed for differences that are no matter of degree. `allowed`: largest
    error that counts as rounding. `complaint`: says what is wrong, given an error beyond that.
    """

    reference: Callable[[Case], Result]
    candidate: Callable[[Case], Result]
    cases: Iterable[Case]
    error_of: Callable[[Case, Result, Result], float]
    allowed: float = 0.0
    complaint: Callable[[float], str] = "error {:.2g}".format

    def errors(self) -> Iterator[float]:
        """Yields the error of each case. Errors of reference and candidate pass through."""
        for case in self.cases:
            expected = self.reference(case)
            yield self.error_of(case, expected, self.candidate(case))

    def check(self) -> float:
        """Returns the largest error. Raises TrialFailed if one is not allowed, or NaN.

        Errors of reference and candidate pass through.
        """
        largest = 0.0
        for error in self.errors():
            if not error <= self.allowed:
                raise TrialFailed(self.complaint(error))
            largest = max(largest, error)
        return largest

    def run(self, name: str = "") -> float:
        """Returns the largest error. Raises TrialFailed, also if anything else is raised.

        `name`: begins the message of the error.
        """
        with trial_failures(name):
            return self.check()


@contextmanager
def trial_failures(name: str = "") -> Iterator[None]:
    """Inside, every exception becomes a TrialFailed, whose message begins with `name`."""
    prefix = f"{name}: " if name else ""
    try:
        yield
    except TrialFailed as error:
        if not prefix:
            raise
        raise TrialFailed(f"{prefix}{error}") from error
    except Exception as error:  # compilers, drivers and models raise whatever they like
        raise TrialFailed(f"{prefix}{type(error).__name__}: {one_line(error)}") from error
