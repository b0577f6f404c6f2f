"""Steps on a device: forward pass, sampling, recordings, and the memory that they need."""
