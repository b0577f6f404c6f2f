"""What all tests share."""

from __future__ import annotations

import os

# Tiny tensors: a second thread costs more than it gives, most of all while other tests run beside.
os.environ["OMP_NUM_THREADS"] = "1"
