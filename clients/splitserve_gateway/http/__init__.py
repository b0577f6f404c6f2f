"""What every endpoint needs of HTTP: bounded bodies, errors in OpenAI's shape, event streams."""
