"""Audio files: decoded block by block to one channel, and cut into windows of features.

A file is decoded twice: once for its length and its loudest part, and again window by window. So
memory does not grow with the length of the audio, which may be hours in a small file.

Shape letters: N samples of a block, M mel bins, F frames of a window.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

from splitserve_client import AudioInput
from splitserve_gateway.audio.log_mel import Float32s, Float64s, log_mel_frames, normalized

FORMATS = ("WAV", "WAVEX", "RF64", "AIFF", "CAF", "FLAC", "OGG", "MP3")
_LEAST_RATE, _MOST_RATE = 1000, 768_000
_MOST_CHANNELS = 64
# Of a block, over all channels, and seconds of it.
_BLOCK_SAMPLES = 2**18
_BLOCK_S = 10


class AudioUnusable(ValueError):
    """Raised for a file that is no decodable audio, or is too long; its text is for callers."""


@dataclass(frozen=True, slots=True)
class AudioLength:
    """Length of the audio. `loudest`: largest logarithm of a mel power.

    `num_frames`: whole frames, at least one window.
    """

    duration_s: float
    num_frames: int
    loudest: float


class AudioFile:
    """Audio in `data`, the contents of a file. Methods may run in a thread, one at a time."""

    def __init__(self, data: bytes | bytearray, audio: AudioInput, max_duration_s: float) -> None:
        """`audio`: the features that the model takes."""
        self._data = data
        self._audio = audio
        self._max_duration_s = max_duration_s
        self._num_window_samples = audio.num_frames * audio.hop_length

    def measure(self) -> AudioLength:
        """Decodes the whole file. Raises AudioUnusable."""
        num_samples, num_frames, loudest = 0, 0, -math.inf

        def counted() -> Iterator[Float32s]:
            nonlocal num_samples
            for block in self._blocks():
                num_samples += len(block)
                yield block

        for frames in log_mel_frames(self._padded(counted()), self._audio):
            num_frames += len(frames)
            loudest = max(loudest, float(frames.max()))
        if not num_samples:
            raise AudioUnusable("has no samples; allowed: 1 or more")
        return AudioLength(num_samples / self._audio.sampling_rate, num_frames, loudest)

    def windows(self, length: AudioLength) -> FeatureWindows:
        """Returns the windows of the file, whose `length` was measured."""
        frames = log_mel_frames(self._padded(self._blocks()), self._audio)
        return FeatureWindows(frames, self._audio, length.loudest)

    def _padded(self, blocks: Iterable[Float32s]) -> Iterator[Float32s]:
        """Yields `blocks`, followed by silence up to the length of a window."""
        num_samples = 0
        for block in blocks:
            num_samples += len(block)
            yield block
        if num_samples < self._num_window_samples:
            yield np.zeros(self._num_window_samples - num_samples, np.float32)

    def _blocks(self) -> Iterator[Float32s]:
        """Yields samples [N] of one channel, in the model's sampling rate."""
        try:
            with soundfile.SoundFile(io.BytesIO(self._data)) as file:
                self._check(file)
                yield from self._resampled(file)
        except soundfile.SoundFileError as error:
            raise AudioUnusable(
                f"cannot be decoded as audio ({_reason(error)}); allowed: {', '.join(FORMATS)}"
            ) from error

    def _check(self, file: soundfile.SoundFile) -> None:
        if file.format not in FORMATS:
            raise AudioUnusable(f"has the format {file.format}; allowed: {', '.join(FORMATS)}")
        if not _LEAST_RATE <= file.samplerate <= _MOST_RATE:
            raise AudioUnusable(
                f"has a sampling rate of {file.samplerate} Hz; allowed: {_LEAST_RATE} to"
                f" {_MOST_RATE}"
            )
        if file.channels > _MOST_CHANNELS:
            raise AudioUnusable(f"has {file.channels} channels; allowed: at most {_MOST_CHANNELS}")

    def _resampled(self, file: soundfile.SoundFile) -> Iterator[Float32s]:
        rate, num_read = file.samplerate, 0
        size = min(_BLOCK_SAMPLES // file.channels, _BLOCK_S * rate)
        resampler = soxr.ResampleStream(rate, self._audio.sampling_rate, 1, dtype="float32")
        is_same = rate == self._audio.sampling_rate
        while True:
            block = file.read(size, dtype="float32", always_2d=True)
            num_read += len(block)
            if num_read > self._max_duration_s * rate:
                raise AudioUnusable(
                    f"is longer than {self._max_duration_s / 60:g} minutes; allowed: at most that"
                )
            if not np.isfinite(block).all():
                raise AudioUnusable("has samples that are not finite numbers")
            mono = np.ascontiguousarray(block.mean(axis=1))
            samples = mono if is_same else resampler.resample_chunk(mono, last=not len(block))
            if len(samples):
                yield samples
            if not len(block):
                return


class FeatureWindows:
    """Windows of features, which begin at rising frames."""

    def __init__(self, frames: Iterator[Float64s], audio: AudioInput, loudest: float) -> None:
        self._frames = frames
        self._audio = audio
        self._loudest = loudest
        self._known = np.empty((0, audio.num_mel_bins))
        self._start = 0

    def window(self, start: int) -> Float32s:
        """Returns features [M, F] from the frame `start` on, which no later window precedes.

        Behind the end of the audio they are zeros. Raises AudioUnusable.
        """
        end = start + self._audio.num_frames
        pieces, num_known = [self._known], self._start + len(self._known)
        while num_known < end and (piece := next(self._frames, None)) is not None:
            pieces.append(piece)
            num_known += len(piece)
        known = np.concatenate(pieces)[start - self._start :]
        self._known, self._start = known, start
        features = np.zeros((self._audio.num_mel_bins, self._audio.num_frames), np.float32)
        of_window = normalized(known[: self._audio.num_frames], self._loudest)
        features[:, : len(of_window)] = of_window.T
        return features


def _reason(error: Exception) -> str:
    return str(error).rpartition(": ")[2].rstrip(".") or type(error).__name__
