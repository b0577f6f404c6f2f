"""What callers may send: pydantic models, one module for each endpoint."""
