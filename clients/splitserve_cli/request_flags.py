"""Command-line flags for the parameters of a request."""

from __future__ import annotations

import argparse

from splitserve_contract import PARAMETERS
from splitserve_text import (
    BeamSearch,
    Choices,
    EarlyStopping,
    Grammar,
    JsonSchema,
    Lark,
    Regex,
    SamplingParams,
    SchedulingParams,
)

_INT32_MAX = 2**31 - 1
_MAX_DEADLINE_S = 315_576_000_000  # limit of a protobuf Duration


# -- values ----------------------------------------------------------------------------------------


def int32(text: str) -> int:
    """Parses a 32-bit integer. Raises ValueError for any other text."""
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
    return int32(token_id), float(bias)


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int32(token_id) for token_id in text.split(","))


# Names that argparse shows if a value cannot be parsed.
int32.__name__ = "integer"
_int64.__name__ = "integer"
_bias.__name__ = "ID=X"
_token_ids.__name__ = "ID,ID,..."


# -- sampling --------------------------------------------------------------------------------------


_BEAM_PREFIX = "beam_search."
_GRAMMAR_FLAGS = (
    (
        "json-schema",
        JsonSchema,
        "JSON",
        'the output is JSON of this schema; any object: {"type": "object"}',
    ),
    ("regex", Regex, "PATTERN", "the whole output matches this pattern"),
    ("lark", Lark, "GRAMMAR", "the output matches this grammar (llguidance's Lark)"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every sampling parameter, and `--stop`."""
    group = parser.add_argument_group("sampling", "Values out of range are refused by the server.")
    for parameter in PARAMETERS:
        whole = _int64 if parameter.num_bits == 64 else int32
        group.add_argument(
            f"--{parameter.flag}",
            dest=parameter.name.removeprefix(_BEAM_PREFIX),
            type=float if parameter.kind is float else whole,
            metavar="X" if parameter.kind is float else "N",
            help=parameter.help,
        )
    group.add_argument(
        "--early-stopping",
        choices=[choice.value for choice in EarlyStopping],
        help="when a beam search stops looking for better completions (default: heuristic)",
    )
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="value added to the token's logit; -inf forbids the token; repeatable",
    )
    group.add_argument(
        "--allowed-token-ids",
        type=_token_ids,
        metavar="ID,ID,...",
        help="only these tokens (default: all)",
    )
    group.add_argument(
        "--bad-words",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that must not be generated, in its usual tokenization; repeatable",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text, after --min-tokens at the earliest; repeatable",
    )
    group.add_argument(
        "--stop-token-id",
        type=int32,
        action="append",
        default=[],
        metavar="ID",
        help="end the output after this token; repeatable",
    )
    for name, kind, metavar, what in _GRAMMAR_FLAGS:
        group.add_argument(
            f"--{name}", dest="grammars", type=kind, action="append", metavar=metavar, help=what
        )
    group.add_argument(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="the output is this text, or that of another --choice; repeatable",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="continue after the end-of-sequence token"
    )


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Returns the sampling parameters given by flags. Raises ValueError for conflicting flags."""
    names = (p.name for p in PARAMETERS if not p.name.startswith(_BEAM_PREFIX))
    return SamplingParams(
        **{name: getattr(arguments, name) for name in names},
        logit_bias=dict(arguments.logit_bias),
        stop_token_ids=tuple(arguments.stop_token_id),
        ignore_eos=arguments.ignore_eos,
        beam_search=_beam_search(arguments),
        allowed_token_ids=arguments.allowed_token_ids,
        grammar=_grammar(arguments),
    )


def _grammar(arguments: argparse.Namespace) -> Grammar | None:
    grammars: list[Grammar] = list(arguments.grammars or [])
    if arguments.choice:
        grammars.append(Choices(tuple(arguments.choice)))
    if len(grammars) > 1:
        raise ValueError("give only one of --json-schema, --regex, --lark and --choice")
    return grammars[0] if grammars else None


def _beam_search(arguments: argparse.Namespace) -> BeamSearch | None:
    stopping = arguments.early_stopping
    if arguments.width is not None:
        return BeamSearch(
            arguments.width,
            arguments.length_penalty,
            None if stopping is None else EarlyStopping(stopping),
        )
    dependent = {"--length-penalty": arguments.length_penalty, "--early-stopping": stopping}
    for name, value in dependent.items():
        if value is not None:
            raise ValueError(f"{name} needs --beam-width")
    return None


# -- scheduling ------------------------------------------------------------------------------------


def add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every scheduling parameter."""
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--priority", type=int32, default=0, metavar="N", help="smaller is more urgent (default: 0)"
    )
    group.add_argument(
        "--tenant", default="", metavar="NAME", help="tenant whose fair share is used"
    )
    group.add_argument(
        "--deadline-s",
        type=float,
        metavar="SECONDS",
        help="time until which the last token is due; to give up, see --timeout",
    )
    group.add_argument(
        "--target-itl-ms",
        type=int32,
        metavar="MS",
        help="wanted time between tokens while the executor also computes prompts",
    )
    group.add_argument("--adapter", default="", metavar="NAME", help="LoRA adapter to use")
    group.add_argument(
        "--cache-salt",
        default="",
        metavar="TEXT",
        help="share cached prompts only with requests of the same salt",
    )
    group.add_argument(
        "--bypass-prefix-cache", action="store_true", help="neither use nor fill the prefix cache"
    )
    group.add_argument(
        "--num-public-prefix-tokens",
        type=int32,
        default=0,
        metavar="N",
        help="share the cached beginning of the prompt with other tenants (default: 0 tokens)",
    )


def scheduling_params(arguments: argparse.Namespace) -> SchedulingParams:
    """Returns the scheduling parameters given by flags.

    Raises ValueError for an invalid deadline.
    """
    deadline_s = arguments.deadline_s
    if deadline_s is not None and not 0 < deadline_s < _MAX_DEADLINE_S:
        raise ValueError(f"argument --deadline-s: {deadline_s:g} is out of range; allowed: above 0")
    return SchedulingParams(
        arguments.priority,
        arguments.tenant,
        deadline_s,
        arguments.adapter,
        arguments.cache_salt,
        arguments.bypass_prefix_cache,
        arguments.num_public_prefix_tokens,
        target_itl_ms=arguments.target_itl_ms,
    )
