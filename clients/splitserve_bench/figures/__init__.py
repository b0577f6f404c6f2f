"""Measured figures in bounded memory: distributions, confidence intervals, rates, errors."""
