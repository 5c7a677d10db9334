"""The report's ablations as studies: arms of full recipes, seeds, a budget, and claims as checked predicates."""
