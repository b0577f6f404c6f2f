"""Checkpoints of random weights, written where they are fast and fit: none can be fetched here."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu_check.models import make_model
from benchmarks.gpu_check.results import Measurement
from benchmarks.gpu_check.sizes import ModelShape, Sizes


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for checkpoints and logs, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(shape: ModelShape, folder: Path, sizes: Sizes) -> Iterator[Measurement]:
    """Into `folder`, which is made."""
    started = time.perf_counter()
    model = make_model(shape, sizes)
    model.save_pretrained(folder)
    del model
    gc.collect()
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    note = f"{num_bytes / 2**30:.2f} GiB"
    yield Measurement(f"{shape.name} written", time.perf_counter() - started, "s", note=note)
