"""Loading and saving HF models, packed attention, the fused log-prob/entropy head, the tiny reasoner."""
