"""Form fields of transcriptions and translations. Values of a form are texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from splitserve_gateway.schemas.base import (
    NULL_IS_DEFAULT,
    ApiRequest,
    Flag,
    Int32,
    Int64,
    Label,
    Refused,
)

MAX_PROMPT_CHARS = 16_384

TranscriptFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]


class TranslationRequest(ApiRequest):
    """Form fields of a translation to English, without its file."""

    model_config = ConfigDict(strict=False)

    model: Label | None = None
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARS)] | None = None
    response_format: Annotated[TranscriptFormat, NULL_IS_DEFAULT] = "json"
    temperature: Annotated[float, Field(ge=0, le=1), NULL_IS_DEFAULT] = 0.0

    seed: Int64 | None = None
    user: Label | None = None
    priority: Int32 | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    target_itl_ms: Int32 | None = None
    cache_salt: Label | None = None
    request_id: Label | None = None


class TranscriptionRequest(TranslationRequest):
    """Form of a transcription. `language`: a code such as `en`; detected if it is absent."""

    language: Annotated[str, Field(max_length=16)] | None = None
    timestamp_granularities: Annotated[tuple[Literal["segment", "word"], ...], NULL_IS_DEFAULT] = ()
    stream: Flag = False

    chunking_strategy: Refused = None
    include: Refused = None
    keywords: Refused = None
    languages: Refused = None
    known_speaker_names: Refused = None
    known_speaker_references: Refused = None


def form_values(fields: dict[str, list[str]]) -> dict[str, object]:
    """Returns the values of a form in the shape of a body; lists have names that end in `[]`."""
    values: dict[str, object] = {}
    for name, given in fields.items():
        bare = name.removesuffix("[]")
        is_list = bare != name or bare == "timestamp_granularities"
        # An empty field is how many clients leave one out.
        values[bare] = given if is_list else (given[-1] or None)
    return {name: value for name, value in values.items() if value is not None}
