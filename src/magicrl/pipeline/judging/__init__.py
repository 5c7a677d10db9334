"""Votes of language models on whether a problem is well posed, and what their votes are worth."""
