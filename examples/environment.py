"""A custom environment: it says one digit per turn, and the model repeats each of them.

Copy this file to an empty folder:

    python environment.py                                                     # writes problems.jsonl and recipe.toml
    magicrl train recipe.toml --output runs/echo
    magicrl eval --model runs/echo/model --benchmark problems.jsonl --environment environment.py:Echo \
        --max-turns 3 --max-observation-tokens 1 --samples 4 --max-tokens 16 --output runs/eval
"""

import json
from pathlib import Path

from magicrl.environments.base import Step

RECIPE = """
[run]
name = "echo"
threads = 1
[start]
sft = "tiny-sft"  # a tiny model that knows digits and sums
[[data.train]]
path = "problems.jsonl"
environment = "environment.py:Echo"
[environment]
max_turns = 3  # turns of the model: one before the first digit, one after each of two digits
max_observation_tokens = 1
[rollout]
memory_limit_mb = 64
[entropy]
preset = "small"
[optimizer]
learning_rate = 5e-3
[[stages]]
max_tokens = 16  # sampled tokens of all turns together
rollout_batch = 8
group_size = 8
max_steps = 20
"""


class Echo:
    """Episode whose reward is the share of digits that the model repeated; each response gets its own object."""

    def reset(self, problem):
        self.said, self.left, self.right = [], list(problem.extra["digits"]), 0  # another column of the file

    def step(self, text):
        self.right += self.said[-1:] == text.split()[-1:] and bool(self.said)  # the first turn repeats nothing
        if not self.left:
            return Step(reward=self.right / len(self.said), done=True, metrics={"digits_right": self.right})
        self.said.append(self.left.pop(0))
        return Step(observation=self.said[-1])


if __name__ == "__main__":
    rows = [{"prompt": f"L {i // 10} {i % 10} :", "digits": [str(i * 7 % 10), str(i * 3 % 10)]} for i in range(40)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.toml").write_text(RECIPE)
