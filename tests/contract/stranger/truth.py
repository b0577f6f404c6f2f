"""What the emulated model computes, as pure functions: the truth that streams are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.contract.stranger.columns import as_f32

MASK = 2**64 - 1
CHAIN_START = 0x51ED270B0F4A5C11
VOCAB_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Score:
    """A logprob as the contract wants it: float32, with a rank and the top N."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def _scramble(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def mix(chain: int, token_id: int, position: int) -> int:
    """64 bits that stand for all tokens up to and including this one."""
    return _scramble((chain * 0x9E3779B97F4A7C15 + token_id * 0x2545F491 + position + 1) & MASK)


def sample(chain: int, seed: int, temperature: float, position: int, vocab_size: int) -> int:
    """The token at `position`, sampled after the tokens that `chain` stands for."""
    randomness = 0 if temperature == 0 else (seed & MASK) ^ 0x7F4A7C15
    return mix(_scramble(chain ^ randomness), 7, position) % vocab_size


def chain_of(token_ids: Sequence[int]) -> int:
    """The chain at the last of `token_ids`."""
    chain = CHAIN_START
    for position, token_id in enumerate(token_ids):
        chain = mix(chain, token_id, position)
    return chain


def expected_tokens(
    prompt: Sequence[int], seed: int, temperature: float, n: int, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """The `n` tokens that a correct scheduler streams for `prompt`."""
    chain = chain_of(prompt)
    output: list[int] = []
    for position in range(len(prompt), len(prompt) + n):
        output.append(sample(chain, seed, temperature, position, vocab_size))
        chain = mix(chain, output[-1], position)
    return output


def score(chain: int, token_id: int, num_top: int, vocab_size: int) -> Score:
    """The made-up logprob of `token_id` after the tokens that `chain` stands for."""
    draw = mix(chain, token_id, 1)
    first = chain % vocab_size
    top = tuple(
        ((first + index) % vocab_size, as_f32(-0.125 * (index + 1))) for index in range(num_top)
    )
    return Score(token_id, as_f32(-1.0 - draw % 1000 / 64), 1 + draw % vocab_size, top)


def expected_scores(token_ids: Sequence[int], first: int, num_top: int) -> list[Score]:
    """The scores of `token_ids[first:]`, each given all tokens before it."""
    return [
        score(chain_of(token_ids[:position]), token_ids[position], num_top, VOCAB_SIZE)
        for position in range(first, len(token_ids))
    ]
