"""Ablation studies: configurations of full recipes, seeds, a budget, and claims that are tested."""
