"""Grammars of answers: those that requests ask for, and checks that they compile.

Text only, no web.
"""
