"""Text generation: request bodies to prompts and sampling parameters, and streams of choices."""
