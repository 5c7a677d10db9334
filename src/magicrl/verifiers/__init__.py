"""problem + response text -> Verdict, in killable workers. Imports no torch."""
