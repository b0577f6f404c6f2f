"""What all requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiRequest(BaseModel):
    """A request body. A field that is not declared is refused by name."""

    model_config = ConfigDict(extra="forbid")
