"""Who sends requests over HTTP, and what schedulers say of them."""
