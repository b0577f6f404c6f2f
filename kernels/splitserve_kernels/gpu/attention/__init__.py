"""Paged attention on GPUs: in Triton, and by the package flash-attn."""
