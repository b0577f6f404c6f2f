"""Entry point of `splitserve bench` and `splitserve bench compare`."""

from __future__ import annotations

import sys

from splitserve_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
