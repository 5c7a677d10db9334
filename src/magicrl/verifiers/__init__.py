"""Judging answers: a problem and a text in, a `Verdict` out. Usable alone; imports no torch."""

from magicrl.verifiers.base import JudgeOptions as JudgeOptions
from magicrl.verifiers.base import Verifier as Verifier
from magicrl.verifiers.base import VerifierService as VerifierService
from magicrl.verifiers.pool import Ticket as Ticket
from magicrl.verifiers.pool import VerifierPool as VerifierPool
from magicrl.verifiers.rewards import reward as reward
