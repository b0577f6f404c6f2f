"""What a scheduler shows to those who watch it at work."""
