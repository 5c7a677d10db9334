"""Recipes: pydantic schema, TOML loading, --set overrides. Imports no torch."""
