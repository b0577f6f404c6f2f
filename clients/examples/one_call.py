"""Completes a text in one call. A string is continued without a chat template."""

import sys

from splitserve_client import Client, SamplingParams


def main(address: str) -> None:
    """Prints a completion."""
    with Client(address) as client:
        generation = client.complete_text("Once upon a time", SamplingParams(max_tokens=20))
        print(generation.text)
        print(generation.usage.num_output_tokens, "tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
