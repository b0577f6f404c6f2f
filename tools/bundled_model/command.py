"""The command lines of the training recipes, and what they print."""

import argparse
import sys
from pathlib import Path


def parse_arguments(description: str | None, seed: int, num_steps: int) -> argparse.Namespace:
    """Return the command line; `seed` and `num_steps` are the defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--num-steps", type=int, default=num_steps)
    return parser.parse_args()


def say(line: str) -> None:
    """Print `line` now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
