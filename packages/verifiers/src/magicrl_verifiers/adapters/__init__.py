"""Verifiers as rewards of other trainers: TRL (`trl`), verl (`verl`), Prime Intellect's verifiers (`magicrl_judge`)."""
