"""Native kernels for the CPU: attention, matrix products, and a whole decoder."""
