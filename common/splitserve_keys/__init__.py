"""API keys, and the file of their digests, for the command `splitserve keys` and schedulers."""
