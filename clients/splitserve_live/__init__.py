"""Live view of a scheduler, as a web page and in a terminal."""
