"""Old import path of the package `magicrl_verifiers`, readable for one release."""

from __future__ import annotations

import warnings

from magicrl_verifiers import JudgeOptions as JudgeOptions
from magicrl_verifiers import Ticket as Ticket
from magicrl_verifiers import Verifier as Verifier
from magicrl_verifiers import VerifierPool as VerifierPool
from magicrl_verifiers import VerifierService as VerifierService
from magicrl_verifiers import reward as reward

warnings.warn("magicrl.verifiers is now the package magicrl_verifiers; import from there", DeprecationWarning, 2)
