"""The maths verifier: the recipe's four steps on Math-Verify, cheap exact comparisons first.

`maths_verifier.MathsVerifier` runs inside worker processes; importing this package alone loads neither sympy nor
Math-Verify.
"""
