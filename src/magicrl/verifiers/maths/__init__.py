"""The maths verifier: the four steps of the recipe on Math-Verify."""
