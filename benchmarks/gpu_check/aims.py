"""What is wanted of an H200, and of other devices by what they can do beside one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from benchmarks.gpu_check.machine import Rates, rates_of
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import Sizes

# What a copy and a product of 8192 reached on an H200.
_H200 = Rates(bandwidth=4.3e12, flops=790e12)


class Bound(Enum):
    """What limits a figure, so that a slower device has a lower aim."""

    NOTHING = "as it is"
    BANDWIDTH = "by bandwidth"
    ARITHMETIC = "by arithmetic"


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of an H200. `is_most`: at most that much is wanted, else at least."""

    figure: float
    bound: Bound = Bound.NOTHING
    is_most: bool = False

    def here(self, sizes: Sizes) -> float:
        """The figure of this device; faster ones than an H200 have its."""
        if self.bound is Bound.NOTHING:
            return self.figure
        rates = rates_of(sizes)
        part = (
            rates.bandwidth / _H200.bandwidth
            if self.bound is Bound.BANDWIDTH
            else rates.flops / _H200.flops
        )
        # Measurements of the same device differ by some percent.
        return self.figure * (1 if part > 0.97 else part)


# Share of a copy's bandwidth that decode attention reaches, where it reads enough.
DECODE_SHARE = Aim(0.85)
# Times that the reading of its keys and values takes, however they are spread over rows.
UNEVEN_TIMES = Aim(1.5, is_most=True)
# TFLOP/s of prompt attention.
PROMPT_ATTENTION = {True: Aim(550, Bound.ARITHMETIC), False: Aim(400, Bound.ARITHMETIC)}
# Tokens per second of decodes of an 8B Llama's shape, by rows; greedy and with top-p alike.
LLAMA_8B_DECODES = {
    1: Aim(220, Bound.BANDWIDTH),
    32: Aim(5_600, Bound.BANDWIDTH),
    256: Aim(15_000, Bound.BANDWIDTH),
}
LLAMA_8B_PROMPTS = Aim(42_000, Bound.ARITHMETIC)
START_S = Aim(60, is_most=True)
# A call that only asks for something returns within this, in milliseconds.
ASKING_MS = Aim(5, is_most=True)
NO_COMPILATION = Aim(0, is_most=True)


def judged(
    name: str, value: float, unit: str, aim: Aim | None, sizes: Sizes, note: str = ""
) -> Measurement:
    """A line, with the aim and whether it is met, where there is one and a GPU to judge."""
    if aim is None or sizes.device.type != "cuda":
        return Measurement(name, value, unit, note=note)
    wanted = aim.here(sizes)
    text = f"at {'most' if aim.is_most else 'least'} {wanted:.4g}"
    if wanted != aim.figure:
        text += f" ({aim.figure:g} on an H200, {aim.bound.value})"
    is_met = value <= wanted if aim.is_most else value >= wanted
    return Measurement(name, value, unit, text, is_met, note)
