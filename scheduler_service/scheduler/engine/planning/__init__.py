"""What the next step does: who may come at all, who goes on, who gets a row."""
