"""The parts of the check: what each decides, and what it takes on one H100."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # They need torch, and whoever only starts parts does not.
    from benchmarks.gpu_check.cases import Case
    from benchmarks.gpu_check.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Part:
    """`cases`: the function that makes them, in which module of this package.

    `seconds`: an estimate. `expects_errors`: of the executor's log; elsewhere they are wrong.
    `is_cold`: nothing that Triton compiled before may be there. `is_twin`: another part runs the
    same code at another size, which is enough for a smoke test.
    """

    name: str
    decides: str
    module: str
    seconds: int
    cases: str = "cases"
    expects_errors: bool = False
    is_cold: bool = False
    is_twin: bool = False

    def make_cases(self, sizes: Sizes) -> Iterator[Case]:
        """What belongs to it is imported now: each needs other packages."""
        module = importlib.import_module(f"benchmarks.gpu_check.{self.module}")
        make: Callable[[Sizes], Iterator[Case]] = getattr(module, self.cases)
        return make(sizes)


# In the order in which they are run: what others stand on first.
PARTS = (
    Part("env", "is everything here, how fast is the device?", "environment", 20),
    Part("correct", "is every kernel right?", "correctness", 120),
    Part("decode", "even decodes: share of bandwidth (F1, F5)", "decode", 60),
    Part("uneven", "one long row; decodes beside prompts (F1, F2)", "uneven", 50),
    Part("prefill", "attention of prompts: TFLOP/s (F5, F6)", "prefill", 50),
    Part("waits", "does a step wait for the one before? (F3, F4, F9, F12)", "waits", 150),
    Part("copies", "pageable and pinned copies (F4, F15)", "copies", 30),
    Part("layout", "layers of a block together or apart (F13)", "layout", 90),
    Part("broken", "a recording that fails (F7)", "broken_recordings", 20, expects_errors=True),
    Part("large", "8B, steps two deep (F1-F4, F10-F15)", "whole_models", 400, "large_cases"),
    Part("start", "memory planned; compiled later? (F8, F15)", "starts", 440, is_cold=True),
    Part("server-bundled", "does it serve, start again? (F7)", "server", 120, "bundled_cases"),
    Part(
        "server-large",
        "8B served to 1, 32, 256 streams",
        "server",
        440,
        "large_cases",
        is_twin=True,
    ),
    Part(
        "server-small",
        "0.6B served; preemption (F8, F10)",
        "server",
        440,
        "small_cases",
    ),
    Part(
        "small",
        "0.6B, steps two deep (F10, F14)",
        "whole_models",
        300,
        "small_cases",
        is_twin=True,
    ),
    Part("runs", "several tokens a step: 0.6B, runs of 1 and 8, drafts", "runs", 120),
    Part("draws", "sampling, norms, gates, copies of blocks (F3, F11, F14)", "draws", 100),
    Part("shapes", "heads of 64 to 512, windows, float8 (F16, F18)", "shapes", 150),
    Part("tiles", "other sizes of attention's tiles (F5)", "tiles", 130),
    Part("quantized", "products with packed weights beside those of cuBLAS", "quantized", 130),
    Part("adapters", "updates of adapters: right? what they add to a step", "adapters", 170),
    Part("packed", "8B with matrices in 4 bits", "whole_models", 150, "packed_cases"),
    Part("decoder", "our decoder beside that of transformers", "decoder", 90),
    Part("tests", "the tests of kernels", "kernel_tests", 400),
)


def wanted_parts(names: Sequence[str] | None, *, is_smoke: bool = False) -> list[Part]:
    """Those that are named, in their order; all if none is. Raises ValueError for another name."""
    known = [part.name for part in PARTS]
    for name in names or ():
        if name not in known:
            raise ValueError(f"--only {name}: there is no such part; allowed: {', '.join(known)}")
    if names:
        return [part for part in PARTS if part.name in names]
    return [part for part in PARTS if not (is_smoke and part.is_twin)]
