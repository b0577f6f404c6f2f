"""gRPC basics of every process: servers, errors, TLS, discovery, logs, and the contract version."""
