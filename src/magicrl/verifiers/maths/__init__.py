"""The maths verifier: the recipe's four steps on Math-Verify, cheap exact comparisons first.

`judge.MathsVerifier` runs inside worker processes; importing this package alone loads neither sympy nor
Math-Verify.
"""
