"""Which KV block holds what, and whose it is."""
