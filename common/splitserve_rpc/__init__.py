"""gRPC basics of every process: servers, errors, TLS, access, health, and watching peers."""
