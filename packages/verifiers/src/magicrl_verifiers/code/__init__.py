"""The code verifier: programs that a model wrote, run in a local sandbox and judged from outside.

`judge.CodeJudge` judges one response in the calling process; `pool.CodePool` many in worker processes, which is
what training and ``magicrl verify code`` use. `docs/reference/code-verifier.md` says what the sandbox holds against.
"""
