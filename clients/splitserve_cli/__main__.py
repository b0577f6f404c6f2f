"""Entry point of `python -m splitserve_cli`, which is the command `splitserve`."""

from __future__ import annotations

import sys

from splitserve_cli.main import main

sys.exit(main())
