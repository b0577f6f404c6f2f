"""KV blocks: block pools, block tables and the prefix cache."""
