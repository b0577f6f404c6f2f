"""The sampling parameters as flags of a command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from splitserve_client.types import SamplingParams

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Flag:
    """A parameter with one value; the server knows its range and default."""

    name: str
    field: str
    kind: type[int] | type[float]
    help: str


_FLAGS = (
    _Flag("max-tokens", "max_tokens", int, "most output tokens (default: what the model allows)"),
    _Flag("min-tokens", "min_tokens", int, "no end before this many output tokens (default: 0)"),
    _Flag("temperature", "temperature", float, "0 is greedy (default: 1)"),
    _Flag("top-k", "top_k", int, "only the K most probable tokens (default: all)"),
    _Flag("top-p", "top_p", float, "only the most probable tokens, up to this sum (default: 1)"),
    _Flag("min-p", "min_p", float, "least probability relative to the best token (default: 0)"),
    _Flag("repetition-penalty", "repetition_penalty", float, "above 1: less of it (default: 1)"),
    _Flag("presence-penalty", "presence_penalty", float, "of tokens already there (default: 0)"),
    _Flag("frequency-penalty", "frequency_penalty", float, "times their count (default: 0)"),
    _Flag("seed", "seed", int, "makes sampling repeatable (default: drawn)"),
    _Flag("logprobs", "num_logprobs", int, "with --json: scores, and the best N alternatives"),
    _Flag("prompt-logprobs", "num_prompt_logprobs", int, "the same of the prompt"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every sampling parameter, and `--stop`."""
    group = parser.add_argument_group("sampling", "Values out of range are refused by the server.")
    for flag in _FLAGS:
        group.add_argument(
            f"--{flag.name}",
            dest=flag.field,
            type=_int64 if flag.field == "seed" else _int32 if flag.kind is int else float,
            metavar="N" if flag.kind is int else "X",
            help=flag.help,
        )
    group.add_argument(
        "--logit-bias", type=_bias, action="append", default=[], metavar="ID=X", help="repeatable"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )
    group.add_argument(
        "--stop-token-id",
        type=_int32,
        action="append",
        default=[],
        metavar="ID",
        help="end after it; repeatable",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """What was given."""
    return SamplingParams(
        **{flag.field: getattr(arguments, flag.field) for flag in _FLAGS},
        logit_bias=dict(arguments.logit_bias),
        stop_token_ids=tuple(arguments.stop_token_id),
        ignore_eos=arguments.ignore_eos,
    )


def _int32(text: str) -> int:
    value = int(text)
    if not -_INT32_MAX - 1 <= value <= _INT32_MAX:
        raise ValueError(text)
    return value


def _int64(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(text)
    return value


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return _int32(token_id), float(bias)


# argparse shows these where a value does not parse.
_int32.__name__ = "integer"
_int64.__name__ = "integer"
_bias.__name__ = "ID=X"
