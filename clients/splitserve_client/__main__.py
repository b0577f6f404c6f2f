"""`python -m splitserve_client` is the command `splitserve`."""

from __future__ import annotations

import sys

from splitserve_client.cli import main

sys.exit(main())
