"""A graded reward for a domain of your own, without reference answers: digits that rise.

It pays each step towards the goal, so that a model learns before it is ever all right. No clone is needed:

    python reward.py                                                      # writes prompts.jsonl and recipe.toml
    magicrl train recipe.toml --output runs/rising
    magicrl eval --model runs/rising/model --benchmark prompts.jsonl --verifier reward.py:score --samples 8 \
        --max-tokens 12 --output runs/eval
"""

import json
from itertools import pairwise
from pathlib import Path

RECIPE = """
[run]
name = "rising"
threads = 1

[start]
sft = "tiny-sft"  # the shipped toy: it knows digits, and answers sums

[[data.train]]
path = "prompts.jsonl"
verifier = "reward.py:score"

[rollout]
max_rows = 64
memory_limit_mb = 64

[entropy]
preset = "small"

[optimizer]
learning_rate = 5e-3

[[stages]]
max_tokens = 12
rollout_batch = 8
group_size = 8
max_steps = 20
"""


def score(problem, response):
    """The share of pairs of neighbours that rise among its digits (of four at least); logged: how many digits."""
    digits = [int(word) for word in response.split() if word.isdigit()]
    rising = sum(later > earlier for earlier, later in pairwise(digits))
    return {"score": rising / max(3, len(digits) - 1), "digits": len(digits)}


score.right_from = 0.9  # what counts as right in accuracy and pass@k; learning uses the scores themselves

if __name__ == "__main__":
    prompts = [f"L {seed % 7} {seed % 5} {seed % 3} :" for seed in range(40)]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in dict.fromkeys(prompts)))
    Path("recipe.toml").write_text(RECIPE)
