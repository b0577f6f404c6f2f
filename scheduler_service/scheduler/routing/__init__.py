"""Routing of requests: each begins at the executor with the earliest estimated first token."""
