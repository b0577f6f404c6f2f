"""HTTP endpoints, one module per endpoint or family of endpoints."""
