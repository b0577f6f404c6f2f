"""Chat of two turns. The model's chat template turns the messages into a prompt."""

import sys

from splitserve_client import Client, SamplingParams


def main(address: str) -> None:
    """Prints both answers."""
    params = SamplingParams(max_tokens=20)
    messages = [{"role": "user", "content": "What is a scheduler?"}]
    with Client(address) as client:
        first = client.chat(messages, params).text
        print(first)
        messages += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Shorter, please."},
        ]
        print(client.chat(messages, params).text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
