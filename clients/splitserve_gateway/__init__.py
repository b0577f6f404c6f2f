"""The OpenAI-compatible gateway: HTTP in front of schedulers."""
