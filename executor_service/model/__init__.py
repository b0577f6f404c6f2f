"""Models that attend through the KV pools, and the batches that they compute."""
