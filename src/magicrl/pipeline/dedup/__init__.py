"""Duplicates found and the better-specified copy kept."""
