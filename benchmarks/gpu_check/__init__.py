"""One command for a machine with a GPU: is everything right there, and how fast is it?"""
