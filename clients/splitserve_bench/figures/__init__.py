"""What was measured: distributions, how sure they are, rates, errors by kind; in bounded memory."""
