"""gRPC services that clients, executors and operators call."""
