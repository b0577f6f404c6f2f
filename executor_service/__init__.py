"""The executor service: owns the weights and the physical KV cache, computes, decides nothing."""
