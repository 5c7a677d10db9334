"""A custom graded reward without reference answers: write digits that rise.

Each step towards the goal raises the reward, so a model learns before any response is completely right. Copy this file
to an empty folder:

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
sft = "tiny-sft"  # a tiny model that knows digits and sums

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
    """Return the share of neighbouring digits that rise, over at least three pairs; the number of digits is logged."""
    digits = [int(word) for word in response.split() if word.isdigit()]
    rising = sum(later > earlier for earlier, later in pairwise(digits))
    return {"score": rising / max(3, len(digits) - 1), "digits": len(digits)}


score.right_from = 0.9  # counts as right in accuracy and pass@k; training uses the scores

if __name__ == "__main__":
    prompts = [f"L {seed % 7} {seed % 5} {seed % 3} :" for seed in range(40)]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in dict.fromkeys(prompts)))
    Path("recipe.toml").write_text(RECIPE)
