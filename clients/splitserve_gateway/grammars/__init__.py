"""What an answer may be: grammars from requests, and whether they compile. Text only, no web."""
