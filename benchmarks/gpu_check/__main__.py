"""`make gpu-check`: correctness of every GPU kernel, then how fast they and whole models are."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from functools import partial
from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Exit code: 0 if all is right, 1 if something is not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: does it all run?")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="directory of the result file")
    parser.add_argument(
        "--only", nargs="*", help="these parts: kernels, speed, decoder, models, pipeline, tests"
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        # Triton reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not arguments.smoke and not torch.cuda.is_available():
        sys.stderr.write("gpu-check: there is no CUDA device here (or torch has no CUDA)\n")
        return 2
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu_check.correctness import try_kernels
    from benchmarks.gpu_check.decoder import measure_decoder
    from benchmarks.gpu_check.engine import measure_model
    from benchmarks.gpu_check.kernel_tests import TESTS, run_tests
    from benchmarks.gpu_check.kernels import measure_kernels
    from benchmarks.gpu_check.pipeline import measure_pipeline
    from benchmarks.gpu_check.results import Measurement, Section, run_sections, save
    from benchmarks.gpu_check.sizes import full_sizes, smoke_sizes
    from benchmarks.gpu_check.speed import measure_attention

    sizes = smoke_sizes() if arguments.smoke else full_sizes()

    sections: dict[str, Section] = {
        "kernels": lambda: try_kernels(sizes),
        "speed": lambda: measure_attention(sizes),
        "speed of kernels": lambda: measure_kernels(sizes),
        "decoder": lambda: measure_decoder(sizes.models[0], sizes),
        **{f"models, {shape.name}": partial(measure_model, shape, sizes) for shape in sizes.models},
        **{
            f"pipeline, {shape.name}": partial(measure_pipeline, shape, sizes)
            for shape in sizes.models
        },
        **{f"tests, {folder}": partial(run_tests, folder) for folder in TESTS},
    }
    if arguments.smoke:
        for folder in TESTS:
            del sections[f"tests, {folder}"]
        _repair_interpreter()
    wanted = [name for name in sections if name.startswith(tuple(arguments.only or ("",)))]
    errors = _LoggedErrors()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("executor_service").addHandler(errors)
    with torch.inference_mode():
        lines = run_sections(
            {name: sections[name] for name in wanted},
            lambda so_far: save(so_far, sizes.device, arguments.out),
        )
    # What is refused at start is replaced there, so that it shows nowhere else.
    lines += [Measurement("log", text, "error", is_met=False) for text in errors.messages]
    path = save(lines, sizes.device, arguments.out)
    num_wrong = sum(line.is_met is False for line in lines)
    sys.stdout.write(f"{len(lines)} lines, {num_wrong} not met; written to {path}\n")
    return 1 if num_wrong else 0


class _LoggedErrors(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one."""
        self.messages.append(record.getMessage())


def _repair_interpreter() -> None:
    from splitserve_kernels.gpu.availability import why_unavailable

    if why_unavailable() is None:
        from tests.support.devices.interpreter import repair

        repair()


if __name__ == "__main__":
    sys.exit(main())
