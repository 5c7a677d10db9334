"""Plugin name of `magicrl_verifiers.adapters.prime`: Prime Intellect's ``verifiers`` takes top-level modules only."""

from magicrl_verifiers.adapters.prime import MathsJudge

__all__ = ["MathsJudge"]
