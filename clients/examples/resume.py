"""Resumes a completion in a later process, from its tokens so far and its seed.

The client itself resumes a broken stream; this is for completions that outlive the program.
"""

import sys

from splitserve_client import Client, SamplingParams, Tokens


def main(address: str) -> None:
    """Compares an interrupted and resumed completion with an uninterrupted one."""
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    with Client(address) as client:
        tokenizer = client.get_tokenizer()
        prompt = tokenizer.encode("Once upon a time")
        kept: list[int] = []
        for event in client.generate(prompt, params):
            if isinstance(event, Tokens):
                kept += event.token_ids
            if len(kept) >= 5:
                break  # as if the program ended here
        rest = client.complete(prompt, params, resume_token_ids=kept).token_ids
        whole = client.complete(prompt, params).token_ids
        print([*kept, *rest] == list(whole), tokenizer.decode(whole))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
