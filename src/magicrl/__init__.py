"""Reinforcement-learning post-training of long chain-of-thought language models: the MAGIC recipe."""
