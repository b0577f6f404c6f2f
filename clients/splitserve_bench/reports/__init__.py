"""What people and programs read of it: a table, JSON, a picture, a comparison."""
