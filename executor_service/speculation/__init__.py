"""Speculation: drafts that guess next tokens, and steps that verify several guesses at once."""
