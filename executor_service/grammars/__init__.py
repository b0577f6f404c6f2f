"""Which tokens does the grammar of a row allow? Compiled beside the steps; llguidance does it."""
