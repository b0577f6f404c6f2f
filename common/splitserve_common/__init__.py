"""Files, addresses, certificates, discovery and logs of every process; nothing of gRPC."""
