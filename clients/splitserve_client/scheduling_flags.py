"""The scheduling parameters as flags of a command."""

from __future__ import annotations

import argparse

from splitserve_client.sampling_flags import int32
from splitserve_client.types import SchedulingParams

_MAX_DEADLINE_S = 315_576_000_000  # what a protobuf Duration holds


def add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every scheduling parameter."""
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--priority", type=int32, default=0, metavar="N", help="smaller is more urgent (default: 0)"
    )
    group.add_argument("--tenant", default="", metavar="NAME", help="whose fair share this is")
    group.add_argument(
        "--deadline-s",
        type=float,
        metavar="SECONDS",
        help="when the last token is wanted; see --timeout for giving up",
    )
    group.add_argument("--adapter", default="", metavar="NAME", help="LoRA adapter to use")
    group.add_argument(
        "--cache-salt", default="", metavar="TEXT", help="share cached prompts only with this salt"
    )
    group.add_argument(
        "--bypass-prefix-cache", action="store_true", help="neither use nor fill the prefix cache"
    )


def scheduling_params(arguments: argparse.Namespace) -> SchedulingParams:
    """What was given. Raises ValueError for a deadline that cannot be sent."""
    deadline_s = arguments.deadline_s
    if deadline_s is not None and not 0 < deadline_s < _MAX_DEADLINE_S:
        raise ValueError(f"argument --deadline-s: {deadline_s:g} is no time from now")
    return SchedulingParams(
        arguments.priority,
        arguments.tenant,
        deadline_s,
        arguments.adapter,
        arguments.cache_salt,
        arguments.bypass_prefix_cache,
    )
