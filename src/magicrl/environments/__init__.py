"""Tasks that answer back: what an environment is, the workers that play it, and those that come with magicrl."""
