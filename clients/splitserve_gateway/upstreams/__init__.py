"""Schedulers as the gateway sees them: what each serves, and the session that carries requests."""
