"""Reports for people and programs: table, JSON, picture, comparison."""
