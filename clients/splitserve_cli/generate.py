"""Command `splitserve generate`: streams a completion from a running server."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from splitserve_cli.command_line import TextFile, add_server, as_seen_by_people, client_config, run
from splitserve_cli.request_flags import (
    add_sampling_flags,
    add_scheduling_flags,
    int32,
    sampling_params,
    scheduling_params,
)
from splitserve_client import AsyncClient, GrowingText, stream_text
from splitserve_text import (
    ChatTemplateFailed,
    End,
    FinishReason,
    Piece,
    Prompt,
    SamplingParams,
    SchedulingParams,
    SequenceFinish,
    Tokenizer,
    TokenizerUnavailable,
    TokenLogprob,
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    if arguments.stream and not arguments.json:
        parser.error("--stream needs --json; text is always streamed")
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
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text; - or omitted: standard input"
    )
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument(
        "--token-ids",
        type=_token_ids,
        metavar="IDS",
        help="prompt as token ids, such as 1,2,3; the output is token ids, too (no tokenizer)",
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
        help="defaults of sampling flags: the recommendations of the model's authors (see"
        " splitserve info; not with --beam-width), or neutral defaults (default: model)",
    )
    parser.add_argument("--request-id", default="", metavar="ID", help="id of the request")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    add_server(parser)
    add_sampling_flags(parser)
    add_scheduling_flags(parser)
    return parser


def _token_ids(text: str) -> tuple[int, ...]:
    """Parses 32-bit integers. Raises ValueError, which the parser reports."""
    return tuple(int32(number) for number in text.replace(",", " ").split())


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """Returns the prompt. Raises OSError; ValueError if no prompt or several are given."""
    if arguments.token_ids is None:
        return Prompt(_read_prompt(arguments), arguments.system, arguments.raw)
    if arguments.prompt is not None or arguments.file is not None:
        raise ValueError("give only one of --token-ids, PROMPT and --file")
    if not arguments.token_ids:
        raise ValueError("--token-ids is empty; allowed: at least one")
    if arguments.bad_words:
        raise ValueError(
            "--bad-words needs a tokenizer; with --token-ids use --logit-bias TOKEN=-inf"
        )
    return Prompt(token_ids=arguments.token_ids)


def _read_prompt(arguments: argparse.Namespace) -> str:
    """Returns the prompt's text. Raises OSError; ValueError if it is missing or not UTF-8."""
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
            encoder=model.encoder,
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
        # for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    if arguments.json:
        kind = JsonLinesOutput if arguments.stream else JsonOutput
        return kind(sys.stdout, num_completions)
    file = as_seen_by_people(sys.stdout)
    return SeveralTextsOutput(file, num_completions) if num_completions > 1 else TextOutput(file)


# -- output: text, one JSON object, or JSON lines --------------------------------------------------


class Output(Protocol):
    """Output format: receives the pieces in order, then the end."""

    def piece(self, piece: Piece) -> None:
        """Handles new text and tokens."""

    def end(self, end: End) -> None:
        """Handles the end of the request."""


class TextOutput:
    """Writes the text as it arrives, then a newline."""

    def __init__(self, file: TextFile) -> None:
        self._file = file

    def piece(self, piece: Piece) -> None:
        """Writes the text of the piece."""
        if piece.text:
            self._file.write(piece.text)
            self._file.flush()

    def end(self, end: End) -> None:
        """Ends the line."""
        self._file.write("\n")
        self._file.flush()


class SeveralTextsOutput:
    """Writes several texts in order, each below a heading; streams the first unfinished text."""

    def __init__(self, file: TextFile, num_completions: int) -> None:
        self._file = file
        self._texts = [""] * num_completions
        self._is_whole = [False] * num_completions
        self._shown = -1

    def piece(self, piece: Piece) -> None:
        """Writes the text if its completion is the shown one, otherwise stores it."""
        if self._shown < 0:
            self._show(0)
        if piece.index == self._shown:
            self._file.write(piece.text)
        else:
            self._texts[piece.index] += piece.text
        self._is_whole[piece.index] |= piece.finish is not None
        while self._is_whole[self._shown] and self._shown + 1 < len(self._texts):
            self._show(self._shown + 1)
        self._file.flush()

    def end(self, end: End) -> None:
        """Writes the stored texts, and ends the line."""
        while self._shown + 1 < len(self._texts):
            self._show(self._shown + 1)
        self._file.write("\n")
        self._file.flush()

    def _show(self, index: int) -> None:
        gap = "\n\n" if index else ""
        heading = f"--- {index + 1} of {len(self._texts)} ---"
        self._file.write(f"{gap}{heading}\n{self._texts[index]}")
        self._shown = index


class JsonOutput:
    """Writes one JSON object at the end, with a list by index if there are several completions."""

    def __init__(self, file: TextIO, num_completions: int = 1) -> None:
        self._file = file
        self._completions = [GrowingText() for _ in range(num_completions)]
        self._prompt_logprobs: list[TokenLogprob] = []

    def piece(self, piece: Piece) -> None:
        """Collects the piece."""
        self._completions[piece.index].add(piece)
        self._prompt_logprobs.extend(piece.prompt_logprobs)

    def end(self, end: End) -> None:
        """Writes the object."""
        if len(self._completions) == 1:
            content = _content(self._completions[0])
        else:
            content = {
                "completions": [
                    {"index": index, **_content(completion), **_ending(completion)}
                    for index, completion in enumerate(self._completions)
                ]
            }
        scores = _scores((), self._prompt_logprobs)
        _write_line(self._file, {**content, **scores, **_finish(end)})


def _content(text: GrowingText) -> dict[str, Any]:
    return {
        "text": "".join(text.texts),
        "token_ids": text.token_ids,
        **_scores(text.logprobs, ()),
        **_ranking(text.finish),
    }


def _ending(text: GrowingText) -> dict[str, Any]:
    assert text.finish is not None, "every completion ends before its request does"
    return _reason(text.finish.reason, text.stop_string)


class JsonLinesOutput:
    """Writes a JSON line for each piece and one for the end.

    A piece has its index if there are several completions.
    """

    def __init__(self, file: TextIO, num_completions: int = 1) -> None:
        self._file = file
        self._num_completions = num_completions

    def piece(self, piece: Piece) -> None:
        """Writes a line for the piece."""
        content: dict[str, Any] = {"index": piece.index} if self._num_completions > 1 else {}
        content["text"] = piece.text
        content["token_ids"] = piece.token_ids
        content |= _scores(piece.logprobs, piece.prompt_logprobs)
        if piece.finish is not None:
            content |= _ranking(piece.finish)
            content |= _reason(piece.finish.reason, piece.stop_string)
        _write_line(self._file, content)

    def end(self, end: End) -> None:
        """Writes the last line."""
        _write_line(self._file, _finish(end))


def _write_line(file: TextIO, content: dict[str, Any]) -> None:
    file.write(json.dumps(content) + "\n")
    file.flush()


def _finish(end: End) -> dict[str, Any]:
    return {**_reason(end.reason, end.stop_string), "usage": asdict(end.usage)}


def _reason(reason: FinishReason, stop_string: str | None) -> dict[str, Any]:
    content = {"finish_reason": reason.value}
    return content if stop_string is None else {**content, "stop_string": stop_string}


def _ranking(finish: SequenceFinish | None) -> dict[str, Any]:
    """Returns the values that ranked the completion, if any."""
    if finish is None:
        return {}
    ranking = {"cumulative_logprob": finish.cumulative_logprob, "score": finish.score}
    return {name: value for name, value in ranking.items() if value is not None}


def _scores(
    logprobs: Sequence[TokenLogprob], prompt_logprobs: Sequence[TokenLogprob]
) -> dict[str, Any]:
    content = {}
    if logprobs:
        content["logprobs"] = [asdict(score) for score in logprobs]
    if prompt_logprobs:
        content["prompt_logprobs"] = [asdict(score) for score in prompt_logprobs]
    return content
