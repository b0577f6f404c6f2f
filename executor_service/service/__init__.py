"""gRPC service of the executor: decoding of batches, the step worker, answers. No torch."""
