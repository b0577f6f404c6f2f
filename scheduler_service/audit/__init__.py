"""Who did what, for who has to answer for it; never what was said."""
