"""HTTP server parts: connections, bounded bodies, errors in OpenAI's format, event streams."""
