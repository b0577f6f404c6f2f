"""Whisper in real processes: transcripts that clients of OpenAI get equal those of `generate`."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import soundfile

from splitserve_client import AsyncClient, InvalidRequest, SamplingParams
from splitserve_gateway.config import GatewayConfig
from splitserve_text import TranscriptionRules
from tests.support.models.tiny_whisper import (
    NUM_MEL_BINS,
    NUM_POSITIONS,
    SAMPLING_RATE,
    START,
    feature_extractor,
    make_tiny_whisper,
    noisy_tone,
)
from tests.support.processes.gateway import serving, url_of
from tests.support.processes.patience import PATIENCE_S, PATIENT
from tests.support.processes.processes import Processes

SHORT_S, LONG_S = 0.7, 2.37
NUM_FEATURES = 2 * NUM_MEL_BINS * NUM_POSITIONS


class WhisperProcesses(Processes):
    """A scheduler and executors of a tiny Whisper model."""

    def start_executor(self, *options: str, address: str = "") -> str:
        return super().start_executor(
            "--dtype", "float32", "--threads", "1", *options, address=address
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes, and what they must answer."""

    processes: WhisperProcesses
    model_name: str
    reference: Any
    tokenizer: Any

    def segments(self, seed: int, num_seconds: float, **options: Any) -> list[Any]:  # noqa: ANN401
        """Returns the segments that `generate` makes of a sound, in as many windows as it needs."""
        is_long = num_seconds > 1
        features = feature_extractor()(
            noisy_tone(seed, num_seconds),
            sampling_rate=SAMPLING_RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest" if is_long else "max_length",
            return_attention_mask=True,
        )
        found = self.reference.generate(
            **features, return_timestamps=True, return_segments=True, **options
        )
        segments: list[Any] = found["segments"][0]
        return segments

    def text(self, token_ids: Any) -> str:  # noqa: ANN401
        """Returns the text of tokens without special tokens and timestamps."""
        words = [each for each in token_ids.tolist() if each < START - 1]
        text: str = self.tokenizer.decode(words)
        return text

    def short_text(self, seed: int, num_before: int = 0, **options: Any) -> str:  # noqa: ANN401
        """Returns what `generate` makes of a short sound, behind `num_before` tokens."""
        features = feature_extractor()(
            noisy_tone(seed, SHORT_S), sampling_rate=SAMPLING_RATE, return_tensors="pt"
        )
        # Otherwise a random model's timestamps would begin further windows.
        found = self.reference.generate(**features, force_unique_generate_call=True, **options)
        return self.text(found[0, num_before:]).strip()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from transformers import AutoTokenizer, WhisperForConditionalGeneration

    model = make_tiny_whisper(tmp_path_factory.mktemp("whisper"), seed=2)
    reference = WhisperForConditionalGeneration.from_pretrained(model)
    running = WhisperProcesses(model)
    try:
        running.start_scheduler()
        running.start_executor()
        yield Stack(running, model.name, reference, AutoTokenizer.from_pretrained(model))
    finally:
        running.kill_all()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    await stack.processes.run_executors(1)
    async with AsyncClient(stack.processes.address, PATIENT) as opened:
        yield opened


@pytest.fixture
async def url(stack: Stack, client: AsyncClient) -> AsyncIterator[str]:
    """Address of a gateway."""
    config = GatewayConfig(
        schedulers=stack.processes.address, max_audio_bytes=2**20, max_audio_s=60.0
    )
    async with serving(config) as gateway:
        yield url_of(gateway)


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as opened:
        yield opened


@pytest.fixture
async def openai_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as opened:
        yield opened


def wav(seed: int, num_seconds: float = SHORT_S) -> tuple[str, bytes]:
    """Name and contents of a file."""
    return "sound.wav", as_wav(noisy_tone(seed, num_seconds))


def as_wav(samples: Any, rate: int = SAMPLING_RATE) -> bytes:  # noqa: ANN401
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


async def test_model_tells_which_features_it_takes(client: AsyncClient) -> None:
    encoder = (await client.get_model()).encoder
    assert encoder is not None
    assert encoder.max_tokens == NUM_POSITIONS
    assert encoder.audio is not None
    assert encoder.audio.num_mel_bins * encoder.audio.num_frames == NUM_FEATURES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "encoder_features has 0 features; allowed: 1600"),
        ({"encoder_features": bytes(12)}, "encoder_features has 3 features; allowed: 1600"),
        ({"encoder_features": bytes(13)}, "encoder_features has 13 bytes"),
        ({"encoder_token_ids": [3]}, "encoder_token_ids has 1 tokens; allowed: none"),
        (
            {"encoder_features": np.full(NUM_FEATURES, np.nan, "<f4").tobytes()},
            r"encoder_features\[0\] is nan",
        ),
    ],
)
async def test_features_are_refused_by_name(
    client: AsyncClient, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await client.complete([START], SamplingParams(max_tokens=2), **fields)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (TranscriptionRules((-1,)), "first_suppressed_token_ids element is -1"),
        (TranscriptionRules((5,) * 1025), "first_suppressed_token_ids has 1025 entries"),
        (TranscriptionRules((), 10**6), "first_timestamp_token_id is 1000000"),
        (TranscriptionRules((), 50, 51), "first_special_token_id is 51; allowed: 0 to 50"),
        (TranscriptionRules((), 50, 1, -1), "max_first_timestamp is -1"),
    ],
)
async def test_rules_are_refused_by_name(
    client: AsyncClient, rules: TranscriptionRules, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await client.complete(
            [START], SamplingParams(transcription=rules), encoder_features=bytes(4 * NUM_FEATURES)
        )


@pytest.mark.parametrize("language", [None, "fr"])
async def test_short_audio_is_transcribed_as_by_generate(
    stack: Stack, openai_client: openai.AsyncOpenAI, language: str | None
) -> None:
    fields: dict[str, Any] = {} if language is None else {"language": language}
    answer = await openai_client.audio.transcriptions.create(
        model=stack.model_name, file=wav(1), **fields
    )
    assert answer.text == stack.short_text(1, task="transcribe", **fields)
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == 1


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_translation_equals_that_of_generate(
    stack: Stack, openai_client: openai.AsyncOpenAI
) -> None:
    answer = await openai_client.audio.translations.create(model=stack.model_name, file=wav(3))
    assert answer.text == stack.short_text(3, task="translate")


async def test_prompt_precedes_the_audio_as_in_generate(
    stack: Stack, openai_client: openai.AsyncOpenAI
) -> None:
    words = "some words before"
    prompt_ids = stack.tokenizer.get_prompt_ids(words, return_tensors="pt")
    expected = stack.short_text(
        1, len(prompt_ids), task="transcribe", language="de", prompt_ids=prompt_ids
    )
    answer = await openai_client.audio.transcriptions.create(
        model=stack.model_name, file=wav(1), language="de", prompt=words
    )
    assert answer.text == expected
    assert expected != stack.short_text(1, task="transcribe", language="de")


@pytest.mark.parametrize("num_seconds", [SHORT_S, LONG_S])
async def test_segments_equal_those_of_generate(
    stack: Stack, openai_client: openai.AsyncOpenAI, num_seconds: float
) -> None:
    answer = await openai_client.audio.transcriptions.create(
        model=stack.model_name,
        file=wav(0, num_seconds),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    expected = stack.segments(0, num_seconds, language="de", task="transcribe")
    assert answer.segments is not None
    found: list[object] = [(each.start, each.end, each.text) for each in answer.segments]
    assert found == [
        (
            pytest.approx(float(each["start"]), abs=1e-3),
            pytest.approx(float(each["end"]), abs=1e-3),
            stack.text(each["tokens"]),
        )
        for each in expected
    ]
    assert len({each.seek for each in answer.segments}) > 1
    assert answer.text == "".join(each.text for each in answer.segments).strip()
    assert answer.duration == pytest.approx(num_seconds)
    assert answer.language == "de"
    assert all(each.avg_logprob < 0 for each in answer.segments)


async def test_formats_show_the_same_segments(
    stack: Stack, openai_client: openai.AsyncOpenAI
) -> None:
    create = openai_client.audio.transcriptions.create
    fields: dict[str, Any] = {
        "model": stack.model_name,
        "file": wav(0, LONG_S),
        "language": "de",
    }
    answers = {
        kind: await create(response_format=kind, **fields)
        for kind in ("json", "text", "srt", "vtt", "verbose_json")
    }
    segments = answers["verbose_json"].segments
    assert answers["text"] == f"{answers['json'].text}\n"
    assert answers["json"].text == answers["verbose_json"].text
    assert answers["srt"].startswith("1\n00:00:")
    assert answers["srt"].count(" --> ") == answers["vtt"].count(" --> ") == len(segments)
    assert answers["vtt"].startswith("WEBVTT\n\n00:00:")


@pytest.mark.parametrize("num_seconds", [SHORT_S, LONG_S])
async def test_stream_brings_the_same_text_in_pieces(
    stack: Stack, openai_client: openai.AsyncOpenAI, num_seconds: float
) -> None:
    fields: dict[str, Any] = {
        "model": stack.model_name,
        "file": wav(0, num_seconds),
        "language": "de",
    }
    whole = await openai_client.audio.transcriptions.create(**fields)
    events = [
        event
        async for event in await openai_client.audio.transcriptions.create(**fields, stream=True)
    ]
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas).rstrip() == whole.text
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole.text


BAD_FORMS: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "no file": ({}, None, "file", "file is required"),
    "text as file": ({"file": "x"}, None, "file", "is not sent as a file"),
    "no audio": ({}, b"x" * 500, "file", "file cannot be decoded as audio"),
    "truncated mp3": ({}, b"ID3\x04\x00\x00" + b"\xff" * 90, "file", "cannot be decoded"),
    "no samples": ({}, as_wav(np.empty(0)), "file", "file has no samples"),
    "nan": ({}, as_wav(np.full(900, np.nan)), "file", "not finite"),
    "too long": ({}, as_wav(np.zeros(70_000), 1000), "file", "longer than 1 minutes"),
    "too large": ({}, bytes(2**20 + 1), "file", "allowed: at most 1048576"),
    "language": ({"language": "xx"}, b"", "language", "'xx'; allowed: en, de, fr"),
    "word": (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
        b"",
        "timestamp_granularities",
        "has 'word'; allowed: 'segment'",
    ),
    "granularity": (
        {"timestamp_granularities[]": "segment"},
        b"",
        "response_format",
        "allowed with timestamp_granularities: 'verbose_json'",
    ),
    "format": ({"response_format": "pdf"}, b"", "response_format", "'json'"),
    "stream": ({"stream": "true", "response_format": "srt"}, b"", "response_format", "'text'"),
    "temperature": ({"temperature": "2"}, b"", "temperature", "less than or equal to 1"),
    "unknown": ({"speed": "1"}, b"", "speed", "unknown field 'speed'"),
    "special": ({"prompt": "<|endoftext|>"}, b"", "prompt", "special token"),
}


@pytest.mark.parametrize("case", list(BAD_FORMS))
async def test_form_is_refused_by_field(http: httpx2.AsyncClient, case: str) -> None:
    fields, data, param, message = BAD_FORMS[case]
    name, good = wav(1)
    # Without a file, httpx sends no form.
    file = ("file", (name, data or good)) if data is not None else ("other", (None, "x"))
    response = await http.post("/v1/audio/transcriptions", data=fields, files=[file])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert message in error["message"], error


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{}", "application/json", 415),
        (b"", "multipart/form-data", 415),
        (b"--x", "multipart/form-data; boundary=x", 400),
        (
            b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--",
            "multipart/form-data; boundary=x",
            400,
        ),
        (b"garbage" * 99, "multipart/form-data; boundary=x", 400),
        (bytes(3 * 2**20), "multipart/form-data; boundary=x", 413),
    ],
)
async def test_malformed_form_is_refused(
    http: httpx2.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    response = await http.post(
        "/v1/audio/transcriptions", content=content, headers={"content-type": kind}
    )
    assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt_token_ids": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_endpoints_of_texts_name_those_of_audio(
    http: httpx2.AsyncClient, path: str, body: dict[str, object]
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "model", error
    assert "/v1/audio/transcriptions" in error["message"]
