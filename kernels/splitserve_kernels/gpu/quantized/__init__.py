"""Linear layers with quantised weights on GPUs: packed codes in Triton, and FP8 products."""
