"""Device resources: KV pools, streams, copies between host and device, memory."""
