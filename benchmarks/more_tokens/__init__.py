"""What a token costs served, with and without several tokens a step, beside llama.cpp."""
