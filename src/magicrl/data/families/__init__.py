"""Generated task families."""
