"""Request bodies of the API as pydantic models."""
