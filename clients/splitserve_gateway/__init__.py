"""OpenAI-compatible gateway: serves HTTP and forwards requests to schedulers."""
