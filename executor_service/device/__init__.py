"""What lies on a device, and what moves there: KV pools, streams, copies, memory."""
