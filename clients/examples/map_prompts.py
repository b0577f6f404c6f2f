"""Completes many prompts at once: results in order; a failed one does not affect others."""

import sys

from splitserve_client import Client, SamplingParams


def main(address: str) -> None:
    """Prints a line for each prompt."""
    prompts = [f"The number {number} is" for number in range(20)]
    prompts[7] = "far too long " * 1000
    with Client(address) as client:
        for result in client.map(prompts, SamplingParams(max_tokens=5), max_running=8):
            if result.error is not None:
                print(result.index, "failed:", result.error.reason)
            else:
                print(result.index, repr(result.text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
