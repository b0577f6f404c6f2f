"""Endpoints of audio: `POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from splitserve_gateway.audio import AudioFile, Subtitle, as_srt, as_vtt
from splitserve_gateway.endpoints.context import Gateway, gateway_of
from splitserve_gateway.endpoints.shapes import Json, with_notes
from splitserve_gateway.generation import (
    Segment,
    Transcription,
    TranscriptionTask,
    speech_of,
    transcribes,
)
from splitserve_gateway.http import (
    NAMED_EVENTS,
    Form,
    event_stream,
    invalid,
    quoted,
    read_form,
    refusal_of,
)
from splitserve_gateway.schemas import TranscriptionRequest, TranslationRequest, form_values
from splitserve_text import SchedulingParams, SpeechTask, SpeechTokens, Tokenizer

router = APIRouter()

_FILE = "file"
# Of a form beside its file.
_FORM_BYTES = 1024 * 1024
_STREAMED_FORMATS = ("json", "text")
_LANGUAGE_OF_TRANSLATIONS = "en"


@router.post("/v1/audio/transcriptions")
async def create_transcription(request: Request) -> Response:
    """Transcribes the speech in an audio file."""
    return await _answer(request, TranscriptionRequest, "transcribe")


@router.post("/v1/audio/translations")
async def create_translation(request: Request) -> Response:
    """Translates what is said in a file of audio to English."""
    return await _answer(request, TranslationRequest, "translate")


async def _answer(request: Request, schema: type[TranslationRequest], task: SpeechTask) -> Response:
    gateway = gateway_of(request)
    with gateway.bodies.share(gateway.caller.party) as share:
        most = gateway.config.max_audio_bytes + _FORM_BYTES
        form = await read_form(request, most, share)
        body, data = _parsed(form, schema, gateway)
        transcription = await _transcription(gateway, body, data, task)
        await transcription.begin()
        if isinstance(body, TranscriptionRequest) and body.stream:
            return with_notes(await event_stream(_events(transcription), NAMED_EVENTS), body)
        async with aclosing(transcription.texts()) as texts:
            text = "".join([each async for each in texts]).strip()
    return with_notes(_response(transcription, body, text, task), body)


def _parsed(
    form: Form, schema: type[TranslationRequest], gateway: Gateway
) -> tuple[TranslationRequest, bytearray]:
    """Returns the fields and the file of a form. Raises ApiError."""
    for name in form.files:
        if name != _FILE:
            raise invalid(f"unknown file {quoted(name)!r}; allowed: {_FILE}", quoted(name))
    if _FILE not in form.files:
        is_text = _FILE in form.fields
        how = "is not sent as a file, with a file name" if is_text else "is required"
        raise invalid(f"{_FILE} {how}", _FILE, "missing_field")
    data, max_bytes = form.files[_FILE], gateway.config.max_audio_bytes
    if len(data) > max_bytes:
        raise invalid(f"{_FILE} has {len(data)} bytes; allowed: at most {max_bytes}", _FILE)
    try:
        values = form_values(form.fields)
        body = schema.model_validate(values, context=gateway.validation_context)
    except ValidationError as error:
        raise refusal_of(error) from error
    if isinstance(body, TranscriptionRequest):
        _check(body)
    return body, data


def _check(body: TranscriptionRequest) -> None:
    """Raises ApiError for fields that exclude each other, or are not supported."""
    if "word" in body.timestamp_granularities:
        message = "timestamp_granularities has 'word'; allowed: 'segment'"
        raise invalid(message, "timestamp_granularities")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        message = (
            f"response_format is {body.response_format!r}; allowed with timestamp_granularities:"
            " 'verbose_json'"
        )
        raise invalid(message, "response_format")
    if body.stream and body.response_format not in _STREAMED_FORMATS:
        allowed = " or ".join(map(repr, _STREAMED_FORMATS))
        message = f"response_format is {body.response_format!r}; allowed with stream: {allowed}"
        raise invalid(message, "response_format")


async def _transcription(
    gateway: Gateway, body: TranslationRequest, data: bytearray, task: SpeechTask
) -> Transcription:
    serving = await gateway.choose(body.model, transcribes)
    speech, audio = speech_of(serving)
    wanted = TranscriptionTask(
        task,
        _language(body, speech, task),
        _previous_text(body.prompt, serving.tokenizer, speech, serving.served.model.max_model_len),
        has_timestamps=body.response_format not in _STREAMED_FORMATS,
        has_logprobs=body.response_format == "verbose_json",
        temperature=body.temperature,
        seed=body.seed,
        scheduling=SchedulingParams(
            priority=body.priority or 0,
            tenant=body.user or "",
            deadline_s=body.deadline_s,
            cache_salt=body.cache_salt or "",
            target_itl_ms=body.target_itl_ms,
        ),
        own_id=body.request_id,
    )
    file = AudioFile(data, audio, gateway.config.max_audio_s)
    return Transcription(serving, speech, audio, file, wanted, gateway.decoding)


def _language(body: TranslationRequest, speech: SpeechTokens, task: SpeechTask) -> str | None:
    """Returns the language code for the model; None to detect the language, or if it knows one.

    Raises ApiError for a task or language that the model does not have.
    """
    if task not in speech.tasks and task == "translate":
        raise invalid("the model does not translate; allowed: a multilingual model", "model")
    given = body.language if isinstance(body, TranscriptionRequest) else None
    if given is None:
        return None
    language = given.lower()
    known = speech.languages or {_LANGUAGE_OF_TRANSLATIONS: 0}
    if language not in known:
        allowed = ", ".join(known)
        raise invalid(f"language is {quoted(given)!r}; allowed: {allowed}", "language")
    return language if speech.languages else None


def _previous_text(
    prompt: str | None, tokenizer: Tokenizer, speech: SpeechTokens, max_model_len: int
) -> tuple[int, ...]:
    """Returns the last tokens of `prompt`, at most half of what the decoder takes."""
    if not prompt or not prompt.strip() or speech.previous is None:
        return ()
    token_ids = tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False)
    if special := [each for each in token_ids if each >= speech.end]:
        message = f"prompt has the special token {tokenizer.token_text(special[0])!r}"
        raise invalid(f"{message}; allowed: text", "prompt")
    return tuple(token_ids[-(max_model_len // 2 - 1) :])


# -- Answers ---------------------------------------------------------------------------------------


async def _events(transcription: Transcription) -> AsyncGenerator[object, None]:
    """Yields the events of a stream."""
    text = ""
    async with aclosing(transcription.texts()) as texts:
        async for each in texts:
            delta = each if text else each.lstrip()
            if delta:
                text += delta
                yield {"type": "transcript.text.delta", "delta": delta}
    done = {"type": "transcript.text.done", "text": text.rstrip()}
    yield {**done, "usage": _usage(transcription)}


def _response(
    transcription: Transcription, body: TranslationRequest, text: str, task: SpeechTask
) -> Response:
    match body.response_format:
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt":
            return PlainTextResponse(as_srt(map(_subtitle, transcription.segments)))
        case "vtt":
            return Response(
                as_vtt(map(_subtitle, transcription.segments)), media_type="text/vtt; charset=utf-8"
            )
        case "json":
            return _json({"text": text, "usage": _usage(transcription)})
        case "verbose_json":
            is_translated = task == "translate"
            content: Json = {
                "task": task,
                "language": _LANGUAGE_OF_TRANSLATIONS if is_translated else transcription.language,
                "duration": round(transcription.duration_s, 3),
                "text": text,
                "segments": [
                    _segment(number, segment, body)
                    for number, segment in enumerate(transcription.segments)
                ],
                "usage": _usage(transcription),
            }
            return _json(content)


def _json(content: Json) -> Response:
    return Response(to_json(content), media_type="application/json")


def _subtitle(segment: Segment) -> Subtitle:
    return Subtitle(segment.start_s, segment.end_s, segment.text)


def _segment(number: int, segment: Segment, body: TranslationRequest) -> Json:
    text = segment.text.encode()
    scores = segment.logprobs
    return {
        "id": number,
        "seek": segment.seek,
        "start": segment.start_s,
        "end": segment.end_s,
        "text": segment.text,
        "tokens": segment.token_ids,
        "temperature": body.temperature,
        "avg_logprob": sum(scores) / len(scores) if scores else 0.0,
        "compression_ratio": len(text) / len(zlib.compress(text)) if text else 0.0,
        # Not computed.
        "no_speech_prob": None,
    }


def _usage(transcription: Transcription) -> Json:
    num_input, num_output = transcription.num_input_tokens, transcription.num_output_tokens
    return {
        "type": "duration",
        "seconds": math.ceil(transcription.duration_s),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "total_tokens": num_input + num_output,
    }
