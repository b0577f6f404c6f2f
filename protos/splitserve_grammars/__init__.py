"""What a grammar is to llguidance, what it may cost, and the process that tries it."""
