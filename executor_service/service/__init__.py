"""The executor's gRPC face: messages to columns, steps to the worker thread. No torch."""
