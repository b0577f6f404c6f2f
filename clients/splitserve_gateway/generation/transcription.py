"""Transcription of audio: one request to a scheduler for each window of the audio.

With timestamps, a window begins where the last complete segment of the one before ended, as in
`generate` of transformers. There is no fallback to higher temperatures, and the text of a window is
no prompt of the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from splitserve_client import AudioInput, InvalidRequest, TokenizerUnavailable
from splitserve_gateway.audio import (
    AudioFile,
    AudioLength,
    AudioUnusable,
    FeatureWindows,
    Span,
    cut_window,
)
from splitserve_gateway.generation.choices import FieldNames, refusal, upstream_id
from splitserve_gateway.generation.prompts import Serving
from splitserve_gateway.http import invalid
from splitserve_gateway.sharing import FairSemaphore
from splitserve_gateway.upstreams import UpstreamRequest
from splitserve_text import (
    Finish,
    SamplingParams,
    SchedulingParams,
    SpeechTask,
    SpeechTokens,
    TokenLogprob,
)

_NO_NAMES: FieldNames = {}


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a transcript. `seek`: frame at which its window begins.

    `logprobs`: of all tokens of its window; empty if not asked for.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    seek: int
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptionTask:
    """Parameters of a transcription, apart from its audio.

    `language`: None to detect it. `previous_text`: tokens of the text that precedes the audio.
    `has_timestamps`: whether segments are wanted; always so for more than one window.
    """

    task: SpeechTask
    language: str | None = None
    previous_text: tuple[int, ...] = ()
    has_timestamps: bool = False
    has_logprobs: bool = False
    temperature: float = 0.0
    seed: int | None = None
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    own_id: str | None = None


class Transcription:
    """Transcript of a file in the making. Call `begin`, then read `texts` to their end.

    `segments`: those complete so far. `language`: None for a model of one language.
    """

    def __init__(
        self,
        serving: Serving,
        speech: SpeechTokens,
        audio: AudioInput,
        file: AudioFile,
        task: TranscriptionTask,
        decoding: FairSemaphore,
    ) -> None:
        """Prepares the transcription. `decoding`: places of files that are being decoded."""
        self._serving = serving
        self._speech = speech
        self._audio = audio
        self._file = file
        self._task = task
        self._decoding = decoding
        self._length = AudioLength(0.0, 0, 0.0)
        self._windows: FeatureWindows | None = None
        self._num_requests = 0
        self.language = task.language
        self.segments: list[Segment] = []
        self.num_input_tokens = 0
        self.num_output_tokens = 0

    @property
    def duration_s(self) -> float:
        """Length of the audio."""
        return self._length.duration_s

    async def begin(self) -> None:
        """Decodes the audio once, and detects the language. Raises ApiError, SplitserveError."""
        async with self._decoding.place(self._serving.caller.party):
            try:
                self._length = await asyncio.to_thread(self._file.measure)
            except AudioUnusable as error:
                raise invalid(f"file {error}", "file", "invalid_audio") from error
        self._windows = self._file.windows(self._length)
        if self.language is None and self._speech.languages:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                allowed_token_ids=tuple(self._speech.languages.values()),
            )
            found, _ = await self._generated([self._speech.start], params, await self._features(0))
            codes = {token_id: code for code, token_id in self._speech.languages.items()}
            self.language = codes[found[0]]

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yields the texts of the audio, whose segments are then known.

        Raises ApiError, SplitserveError.
        """
        has_timestamps = self._task.has_timestamps
        if self._length.num_frames > self._audio.num_frames:
            has_timestamps = True
        if not has_timestamps:
            async with aclosing(self._only_texts()) as texts:
                async for text in texts:
                    yield text
            return
        seek = 0
        frames_of_position = self._audio.num_frames // self._audio.num_positions
        while seek < self._length.num_frames:
            features = await self._features(seek)
            token_ids, logprobs = await self._generated(
                self._prompt(has_timestamps=True, is_first=seek == 0),
                self._params(has_timestamps=True),
                features,
            )
            num_left = min(self._length.num_frames - seek, self._audio.num_frames)
            spans, advance = cut_window(
                token_ids, self._speech.first_timestamp, num_left // frames_of_position
            )
            for span in spans:
                segment = self._segment(span, seek, logprobs)
                self.segments.append(segment)
                yield segment.text
            seek += num_left if advance is None else advance * frames_of_position

    async def _only_texts(self) -> AsyncGenerator[str, None]:
        """Yields the text of the only window as it comes, without timestamps."""
        tokenizer = self._serving.tokenizer
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=True)
        token_ids: list[int] = []
        scores: list[float] = []
        prompt = self._prompt(has_timestamps=False, is_first=True)
        features = await self._features(0)
        texts: list[str] = []
        request = self._request(prompt, self._params(has_timestamps=False), features)
        async with aclosing(self._events(request)) as events:
            async for new, new_scores in events:
                token_ids += new
                scores += [score.logprob for score in new_scores]
                text = detokenizer.push([each for each in new if each < self._speech.end])
                texts.append(text)
                if text:
                    yield text
        texts.append(last := detokenizer.finish())
        self.segments.append(
            Segment(0.0, self.duration_s, "".join(texts), tuple(token_ids), 0, tuple(scores))
        )
        if last:
            yield last

    def _segment(self, span: Span, seek: int, logprobs: Sequence[float]) -> Segment:
        frame_s = self._audio.hop_length / self._audio.sampling_rate
        position_s = frame_s * (self._audio.num_frames // self._audio.num_positions)
        words = [token_id for token_id in span.token_ids if token_id < self._speech.end]
        return Segment(
            round(seek * frame_s + span.start * position_s, 3),
            round(seek * frame_s + span.end * position_s, 3),
            self._serving.tokenizer.decode(words),
            span.token_ids,
            seek,
            tuple(logprobs),
        )

    # -- one window --------------------------------------------------------------------------------

    async def _features(self, seek: int) -> bytes:
        assert self._windows is not None, "begin comes first"
        windows = self._windows
        async with self._decoding.place(self._serving.caller.party):
            features = await asyncio.to_thread(windows.window, seek)
        return features.astype("<f4").tobytes()

    def _prompt(self, *, has_timestamps: bool, is_first: bool) -> list[int]:
        return self._speech.prompt(
            self.language,
            self._task.task,
            has_timestamps=has_timestamps,
            previous_text=self._task.previous_text if is_first else (),
        )

    def _params(self, *, has_timestamps: bool) -> SamplingParams:
        return SamplingParams(
            temperature=self._task.temperature,
            seed=self._task.seed,
            logit_bias=dict.fromkeys(self._speech.suppressed, float("-inf")),
            num_logprobs=0 if self._task.has_logprobs else None,
            transcription=self._speech.rules(has_timestamps=has_timestamps),
        )

    async def _generated(
        self, prompt: list[int], params: SamplingParams, features: bytes
    ) -> tuple[list[int], list[float]]:
        """Returns the output tokens without the one that ends them, and their logprobs."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        async with aclosing(self._events(self._request(prompt, params, features))) as events:
            async for new, scores in events:
                token_ids += new
                logprobs += [score.logprob for score in scores]
        if token_ids and token_ids[-1] == self._speech.end:
            token_ids.pop()
        return token_ids, logprobs

    def _request(
        self, prompt: list[int], params: SamplingParams, features: bytes
    ) -> UpstreamRequest:
        serving, task = self._serving, self._task
        name = "" if serving.adapter is None else serving.adapter.name
        if params.max_tokens is None:
            params = replace(params, max_tokens=serving.served.model.max_model_len - len(prompt))
        request = UpstreamRequest(
            serving.upstream,
            prompt,
            params,
            replace(task.scheduling, adapter=name),
            serving.served.model.digest,
            serving.caller.credential,
            upstream_id(task.own_id, self._num_requests),
            encoder_features=features,
        )
        self._num_requests += 1
        self.num_input_tokens += len(prompt) + self._audio.num_positions
        return request

    async def _events(
        self, request: UpstreamRequest
    ) -> AsyncGenerator[tuple[tuple[int, ...], tuple[TokenLogprob, ...]], None]:
        try:
            async with aclosing(request.events()) as events:
                async for event in events:
                    if isinstance(event, Finish):
                        return
                    self.num_output_tokens += len(event.token_ids)
                    yield event.token_ids, event.logprobs
        except InvalidRequest as error:
            raise refusal(error, _NO_NAMES) from error


def speech_of(serving: Serving) -> tuple[SpeechTokens, AudioInput]:
    """Returns what a speech model needs. Raises ApiError for a model of another kind."""
    served = serving.served
    encoder = served.model.encoder
    if encoder is None or encoder.audio is None:
        raise invalid(
            f"the model {served.model.name!r} takes no audio; allowed: a speech model",
            "model",
        )
    if served.speech is None:
        raise TokenizerUnavailable(
            f"the model {served.model.name!r} is served without a tokenizer, so no text can be"
            f" written ({served.tokenizer_problem or 'its executors offer none'})"
        )
    return served.speech, encoder.audio
