"""Callers of the HTTP API: their credentials, and their identification by schedulers."""
