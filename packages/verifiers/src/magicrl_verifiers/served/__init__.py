"""Models behind OpenAI-compatible servers: how they are reached and read, and what they answered already."""
