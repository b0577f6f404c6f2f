"""Metrics as who reads them has them."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from splitserve_metrics.instruments import Page

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
        """Of families, as tables have them."""
        return {f.name + ("_total" if f.type == "counter" else "") for f in self.families}

    def value(self, name: str, **labels: str) -> float:
        """Of the one sample with these labels. Raises KeyError."""
        return self._numbers[name, frozenset(labels.items())]

    def histogram(self, name: str, **labels: str) -> tuple[float, float]:
        """How many values, and their sum."""
        return self.value(f"{name}_count", **labels), self.value(f"{name}_sum", **labels)

    def total(self, name: str, **labels: str) -> float:
        """Of all samples that have these labels, among others."""
        return sum(
            value
            for (each, found), value in self._numbers.items()
            if each == name and labels.items() <= dict(found).items()
        )
