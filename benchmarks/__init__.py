"""Benchmarks: each prints one JSON object per line with a `bench` name (`make bench`)."""
