"""`splitserve generate`: streams a completion from a running server."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from splitserve_cli.command_line import add_server, client_config, run
from splitserve_cli.generate_output import (
    JsonLinesOutput,
    JsonOutput,
    Output,
    SeveralTextsOutput,
    TextOutput,
)
from splitserve_cli.request_flags import (
    add_sampling_flags,
    add_scheduling_flags,
    int32,
    sampling_params,
    scheduling_params,
)
from splitserve_cli.terminal import as_seen_by_people
from splitserve_client.client import AsyncClient
from splitserve_client.errors import ChatTemplateFailed, TokenizerUnavailable
from splitserve_client.prompt import Prompt
from splitserve_client.text_calls import stream_text
from splitserve_client.text_stream import End
from splitserve_client.tokenizer import Tokenizer
from splitserve_client.types import SamplingParams, SchedulingParams


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.stream and not arguments.json:
        parser.error("--stream goes with --json; text is streamed anyway")
    if arguments.timeout is not None and arguments.timeout <= 0:
        parser.error(f"argument --timeout: {arguments.timeout:g} is not above 0")
    try:
        params = sampling_params(arguments)
        scheduling = scheduling_params(arguments)
        prompt = _prompt(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return run("generate", lambda: _generate(arguments, prompt, params, scheduling))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitserve generate",
        usage="splitserve generate [options] [PROMPT]",
        description="Streams a completion, or several, from a running server. Ctrl-C aborts it.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="- or nothing: standard input")
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument(
        "--token-ids",
        type=_token_ids,
        metavar="IDS",
        help="the prompt as token ids, say 1,2,3; so is the answer, and no tokenizer is needed",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the prompt")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    parser.add_argument(
        "--stream", action="store_true", help="with --json: a JSON line for each piece"
    )
    parser.add_argument(
        "--generation-config",
        choices=["model", "none"],
        default="model",
        help="where sampling flags that are not given come from: what the model's authors recommend"
        " (see splitserve info; not with --beam-width), or the server's neutral defaults"
        " (default: model)",
    )
    parser.add_argument("--request-id", default="", metavar="ID", help="name of the request")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    add_server(parser)
    add_sampling_flags(parser)
    add_scheduling_flags(parser)
    return parser


def _token_ids(text: str) -> tuple[int, ...]:
    """Raises ValueError, which the parser reports, for anything but 32-bit integers."""
    return tuple(int32(number) for number in text.replace(",", " ").split())


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """Raises OSError, or ValueError if there is none, or several."""
    if arguments.token_ids is None:
        return Prompt(_read_prompt(arguments), arguments.system, arguments.raw)
    if arguments.prompt is not None or arguments.file is not None:
        raise ValueError("give --token-ids, PROMPT or --file, not several of them")
    if not arguments.token_ids:
        raise ValueError("--token-ids is empty; allowed: at least one")
    if arguments.bad_words:
        raise ValueError("--bad-words are text; with --token-ids use --logit-bias TOKEN=-inf")
    return Prompt(token_ids=arguments.token_ids)


def _read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt's text. Raises OSError, or ValueError where there is none or it is not UTF-8."""
    if arguments.file is not None:
        if arguments.prompt is not None:
            raise ValueError("give PROMPT or --file, not both")
        return Path(arguments.file).read_text(encoding="utf-8")
    if arguments.prompt not in (None, "-"):
        return str(arguments.prompt)
    if arguments.prompt is None and sys.stdin.isatty():
        raise ValueError("no prompt: give PROMPT or --file, or pipe it in")
    return sys.stdin.read()


async def _generate(
    arguments: argparse.Namespace,
    prompt: Prompt,
    params: SamplingParams,
    scheduling: SchedulingParams,
) -> int:
    output = _output(arguments, params.num_completions)
    async with AsyncClient(arguments.address, client_config(arguments)) as client:
        model = await client.get_model()
        tokenizer = None if prompt.token_ids else await _tokenizer(client)
        if arguments.generation_config == "model":
            params = params.with_defaults(model.default_sampling_params)
        events = stream_text(
            client,
            tokenizer,
            prompt,
            params,
            stop_strings=arguments.stop,
            bad_words=arguments.bad_words,
            request_id=arguments.request_id,
            scheduling=scheduling,
            timeout_s=arguments.timeout,
            model_digest=model.digest,
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, End):
                    output.end(event)
                else:
                    output.piece(event)
    return 0


async def _tokenizer(client: AsyncClient) -> Tokenizer:
    try:
        return await client.get_tokenizer()
    except (TokenizerUnavailable, ChatTemplateFailed) as error:
        raise TokenizerUnavailable(
            f"{error.message}; give token ids (--token-ids 1,2,3), or serve the model with its"
            " tokenizer.json",
            error.reason,
        ) from error


def _output(arguments: argparse.Namespace, num_completions: int) -> Output:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character
    if arguments.json:
        kind = JsonLinesOutput if arguments.stream else JsonOutput
        return kind(sys.stdout, num_completions)
    file = as_seen_by_people(sys.stdout)
    return SeveralTextsOutput(file, num_completions) if num_completions > 1 else TextOutput(file)
