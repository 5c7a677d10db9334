"""Verifiers as rewards of other trainers: TRL (`trl`), verl (`verl`), Prime Intellect's verifiers (`prime`)."""
