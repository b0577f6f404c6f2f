"""Metrics as who reads them has them."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from splitserve_metrics import Page

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Shown:
    """The samples of a page, read by the parser of prometheus_client."""

    def __init__(self, page: Page | str) -> None:
        text = page if isinstance(page, str) else generate_latest(page).decode()
        self.families = list(text_string_to_metric_families(text))
        self._numbers: Numbers = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    @property
    def names(self) -> set[str]:
        """Names of the families, as in the tables of metrics."""
        return {f.name + ("_total" if f.type == "counter" else "") for f in self.families}

    def value(self, name: str, **labels: str) -> float:
        """Value of the sample with exactly these labels. Raises KeyError."""
        return self._numbers[name, frozenset(labels.items())]

    def histogram(self, name: str, **labels: str) -> tuple[float, float]:
        """Count and sum of a histogram."""
        return self.value(f"{name}_count", **labels), self.value(f"{name}_sum", **labels)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples with at least these labels."""
        return sum(
            value
            for (each, found), value in self._numbers.items()
            if each == name and labels.items() <= dict(found).items()
        )
