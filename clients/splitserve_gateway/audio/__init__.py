"""Audio: decoding of files, and the features that speech models take."""

from splitserve_gateway.audio.audio_file import (
    FORMATS,
    AudioFile,
    AudioLength,
    AudioUnusable,
    FeatureWindows,
)
from splitserve_gateway.audio.log_mel import log_mel_frames, mel_filters, normalized
from splitserve_gateway.audio.segments import Span, Subtitle, as_srt, as_vtt, cut_window

__all__ = [
    "FORMATS",
    "AudioFile",
    "AudioLength",
    "AudioUnusable",
    "FeatureWindows",
    "Span",
    "Subtitle",
    "as_srt",
    "as_vtt",
    "cut_window",
    "log_mel_frames",
    "mel_filters",
    "normalized",
]
