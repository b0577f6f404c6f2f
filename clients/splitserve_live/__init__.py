"""A scheduler at work, to be looked at: as a page, and in a terminal."""
