"""Features of audio equal those of transformers; files that are no audio are refused."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from splitserve_client import AudioInput
from splitserve_gateway.audio import AudioFile, AudioUnusable

RATE = 16_000
WHISPER = AudioInput(80, 3000, 1500, RATE, 160, 400)
LARGE = AudioInput(128, 3000, 1500, RATE, 160, 400)
TINY = AudioInput(16, 100, 50, RATE, 160, 400)
HOUR_S = 3600.0


def sound(num_samples: int, rate: int = RATE, noise: float = 0.05) -> npt.NDArray[np.float32]:
    times_s = np.arange(num_samples) / rate
    hiss = np.random.default_rng(7).standard_normal(num_samples)
    tone = np.sin(2 * np.pi * (300 + 40 * times_s) * times_s)
    return (0.3 * tone + noise * hiss).astype(np.float32)


def as_file(
    samples: npt.NDArray[Any], rate: int = RATE, kind: str = "WAV", subtype: str | None = "FLOAT"
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def expected(samples: npt.NDArray[np.float32], audio: AudioInput) -> npt.NDArray[np.float32]:
    """Features [M, F] by transformers, of all frames."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(
        audio.num_mel_bins, RATE, audio.hop_length, audio.num_frames // 100, audio.fft_length
    )
    is_long = len(samples) > audio.num_frames * audio.hop_length
    found = extractor(
        samples,
        sampling_rate=RATE,
        return_tensors="np",
        truncation=False,
        padding="longest" if is_long else "max_length",
    )
    features: npt.NDArray[np.float32] = found.input_features[0]
    return features


@pytest.mark.parametrize("audio", [WHISPER, LARGE, TINY], ids=["80", "128", "tiny"])
@pytest.mark.parametrize("num_samples", [1, 159, 5000, 16_000, 16_001, 50_000, 700_003])
def test_features_equal_those_of_transformers(audio: AudioInput, num_samples: int) -> None:
    samples = sound(num_samples)
    file = AudioFile(as_file(samples), audio, HOUR_S)
    length = file.measure()
    whole = expected(samples, audio)
    assert length.num_frames == whole.shape[1]
    assert length.duration_s == num_samples / RATE
    windows = file.windows(length)
    start = 0
    while start < length.num_frames:
        features = windows.window(start)
        wanted = np.zeros_like(features)
        part = whole[:, start : start + audio.num_frames]
        wanted[:, : part.shape[1]] = part
        # Transformers compute in float32.
        np.testing.assert_allclose(features, wanted, atol=5e-5)
        start += audio.num_frames // 2 + 7


def test_windows_may_begin_anywhere_behind_each_other() -> None:
    samples = sound(80_000)
    file = AudioFile(as_file(samples), TINY, HOUR_S)
    length, whole = file.measure(), expected(samples, TINY)
    windows = file.windows(length)
    for start in (0, 0, 3, 250, 399):
        part = whole[:, start : start + 100]
        np.testing.assert_allclose(windows.window(start)[:, : part.shape[1]], part, atol=1e-5)


@pytest.mark.parametrize("kind", ["FLAC", "WAV", "OGG", "MP3", "AIFF"])
def test_compressed_files_have_nearly_the_same_features(kind: str) -> None:
    samples = sound(40_000)
    file = AudioFile(as_file(samples, kind=kind, subtype=None), TINY, HOUR_S)
    features = file.windows(file.measure()).window(0)
    # A compressed file may begin with silence of the encoder.
    assert np.median(np.abs(features - expected(samples, TINY)[:, :100])) < 0.1


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000, 192_000])
def test_other_sampling_rates_are_converted(rate: int) -> None:
    file = AudioFile(as_file(sound(rate, rate, noise=0.0), rate), TINY, HOUR_S)
    length = file.measure()
    assert length.duration_s == pytest.approx(1.0, abs=1e-3)
    heard = file.windows(length).window(0)
    # Up to 4 kHz, which the lowest rate has.
    low = expected(sound(RATE, noise=0.0), TINY)[:10, :100]
    assert np.median(np.abs(heard[:10] - low)) < 0.1


def test_channels_are_mixed_to_one() -> None:
    samples = sound(30_000)
    channels = np.stack([samples * weight for weight in (2, 0, 1, 1, 0, 0, 3, 1)], axis=1) / 4
    alone, mixed = (AudioFile(as_file(each), TINY, HOUR_S) for each in (samples / 4, channels))
    first, second = (each.windows(each.measure()).window(0) for each in (alone, mixed))
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_silence_of_hours_in_a_small_file_is_refused_by_its_length() -> None:
    silent = as_file(np.zeros(RATE * 600, np.float32), kind="FLAC", subtype=None)
    assert len(silent) < 200_000
    with pytest.raises(AudioUnusable, match="longer than 5 minutes"):
        AudioFile(silent, TINY, 300.0).measure()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be decoded"),
        (b"not audio" * 100, "cannot be decoded"),
        (b"ID3" + bytes(range(256)) * 40, "cannot be decoded"),
        (as_file(np.empty(0, np.float32)), "has no samples"),
        (as_file(np.full(500, np.nan, np.float32)), "not finite"),
        (as_file(np.full(500, np.inf, np.float32)), "not finite"),
        (as_file(sound(500), rate=100), "sampling rate of 100 Hz; allowed: 1000 to 768000"),
        (as_file(np.zeros((50, 100), np.float32)), "has 100 channels; allowed: at most 64"),
        (as_file(sound(500), kind="AU"), "has the format AU"),
    ],
    ids=["empty", "text", "no mp3", "no samples", "nan", "inf", "slow", "channels", "format"],
)
def test_unusable_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(AudioUnusable, match=message):
        AudioFile(data, TINY, HOUR_S).measure()


@pytest.mark.parametrize("kind", ["MP3", "FLAC", "OGG", "WAV"])
def test_truncated_file_is_decoded_as_far_as_it_goes_or_refused(kind: str) -> None:
    whole = as_file(sound(RATE * 4), kind=kind, subtype=None)
    for share in (0.02, 0.3, 0.9):
        file = AudioFile(whole[: int(len(whole) * share)], TINY, HOUR_S)
        with suppress(AudioUnusable):
            assert file.measure().duration_s < 4.2
