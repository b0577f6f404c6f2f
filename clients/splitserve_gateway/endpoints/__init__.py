"""One module for each endpoint, or family of endpoints."""
