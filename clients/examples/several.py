"""Samples several completions of one prompt, which is computed once."""

import sys

from splitserve_client import Client, SamplingParams


def main(address: str) -> None:
    """Prints three completions."""
    params = SamplingParams(max_tokens=10, n=3, temperature=0.8, seed=1)
    with Client(address) as client:
        for completion in client.complete_text("Once upon a time", params).completions:
            print(completion.index, completion.reason.value, repr(completion.text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
