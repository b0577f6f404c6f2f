"""Grammars of rows: vocabulary, compilation beside the steps, and token masks by llguidance."""
