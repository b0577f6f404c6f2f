"""Log-mel spectrogram of audio, block by block, as `WhisperFeatureExtractor` of transformers.

Source: Radford 2022, "Robust speech recognition via large-scale weak supervision", section 2.2. The
mel scale is that of Slaney 1998, "Auditory toolbox": linear below 1000 Hz, logarithmic above.

Shape letters: N samples of a block, F frames, M mel bins, K bins of the Fourier transform.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from splitserve_client import AudioInput

Float64s = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]

_HZ_PER_MEL = 200 / 3
_FIRST_LOG_HZ, _FIRST_LOG_MEL = 1000.0, 15.0
_MELS_PER_OCTAVE = 27 / np.log(6.4)
_LEAST_POWER = 1e-10
# Powers of 10 below the loudest bin of the audio that are kept.
_RANGE = 8.0


def log_mel_frames(blocks: Iterable[Float32s], audio: AudioInput) -> Iterator[Float64s]:
    """Yields frames [F, M] of the logarithms of mel powers, not normalised.

    `blocks`: samples [N] each, together at least half a Fourier transform long. There is a frame
    for each `hop_length` samples, whose transform is centred at the first of them; beyond the ends
    the audio is reflected.
    """
    spectra = _Spectra(audio)
    half, waiting, num_samples = audio.fft_length // 2, np.empty(0), 0
    has_begun = False
    for block in blocks:
        waiting = np.concatenate([waiting, block.astype(np.float64)])
        num_samples += len(block)
        if not has_begun:
            if len(waiting) <= half:
                continue
            waiting, has_begun = np.concatenate([waiting[half:0:-1], waiting]), True
        frames, waiting = spectra.take(waiting, num_samples)
        if len(frames):
            yield frames
    mirrored = waiting[-2 : -half - 2 : -1]
    frames, _ = spectra.take(np.concatenate([waiting, mirrored]), num_samples)
    if len(frames):
        yield frames


def normalized(frames: Float64s, loudest: float) -> Float32s:
    """Returns features of `frames`; `loudest`: their maximum over the whole audio."""
    kept = np.maximum(frames, loudest - _RANGE)
    return ((kept + 4.0) / 4.0).astype(np.float32)


class _Spectra:
    """Computes frames of consecutive samples."""

    def __init__(self, audio: AudioInput) -> None:
        self._hop = audio.hop_length
        self._length = audio.fft_length
        self._window = np.hanning(audio.fft_length + 1)[:-1]
        self._filters = mel_filters(audio)
        self._num_frames = 0

    def take(self, samples: Float64s, num_samples: int) -> tuple[Float64s, Float64s]:
        """Returns the next frames [F, M], and the samples that later frames need.

        `num_samples`: length of the audio so far.
        """
        most = num_samples // self._hop - self._num_frames
        num_frames = max(min((len(samples) - self._length) // self._hop + 1, most), 0)
        self._num_frames += num_frames
        if not num_frames:
            return np.empty((0, self._filters.shape[1])), samples
        end = (num_frames - 1) * self._hop + self._length
        views = np.lib.stride_tricks.sliding_window_view(samples[:end], self._length)
        spectrum = np.fft.rfft(views[:: self._hop] * self._window)
        powers = (spectrum.real**2 + spectrum.imag**2) @ self._filters
        return np.log10(np.maximum(powers, _LEAST_POWER)), samples[num_frames * self._hop :]


def mel_filters(audio: AudioInput) -> Float64s:
    """Returns triangular filters [K, M] of equal area."""
    num_bins = 1 + audio.fft_length // 2
    highest = audio.sampling_rate // 2
    frequencies = np.linspace(0, highest, num_bins)
    edges = _hertz(np.linspace(0.0, _mels(highest), audio.num_mel_bins + 2))
    lows, centres, highs = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies[:, None] - lows) / (centres - lows)
    falling = (highs - frequencies[:, None]) / (highs - centres)
    filters: Float64s = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (highs - lows))
    return filters


def _mels(hertz: float) -> float:
    if hertz < _FIRST_LOG_HZ:
        return hertz / _HZ_PER_MEL
    return float(_FIRST_LOG_MEL + np.log(hertz / _FIRST_LOG_HZ) * _MELS_PER_OCTAVE)


def _hertz(mels: Float64s) -> Float64s:
    above = _FIRST_LOG_HZ * np.exp((mels - _FIRST_LOG_MEL) / _MELS_PER_OCTAVE)
    return np.where(mels < _FIRST_LOG_MEL, mels * _HZ_PER_MEL, above)
