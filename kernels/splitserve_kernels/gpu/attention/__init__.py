"""Paged attention on GPUs: in Triton, and with the package flash-attn."""
