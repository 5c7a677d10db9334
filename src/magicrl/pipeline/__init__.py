"""From raw sources to a training mixture: clean, dedup, decontaminate, difficulty, judge, mix."""
