"""Logits to token ids in a chain of launches: nobody on the host looks at what one has found."""
