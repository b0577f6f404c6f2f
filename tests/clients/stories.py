"""What clients ask the bundled model, and what it says: vLLM's server gives the same texts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

USER: Any = {"role": "user", "content": "Tell me a story about a fox."}
# Its first 6 tokens.
STORY = "Once upon a time, there"
HELLO: Any = {"role": "user", "content": "Hello!"}
# All of it, 23 tokens.
GREETING = "Hello! I am a tiny story model. Ask me for a story about an animal."
PROMPT = "Once upon a time"
# 6 tokens.
CONTINUATION = ", a funny lamb named Ravi"
# Against white space without end, which JSON allows and the model likes.
TERSE: Any = {"temperature": 0, "frequency_penalty": 2}


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo"]


class GetTime(BaseModel):
    """The time in a city."""

    city: Literal["Oslo"]
