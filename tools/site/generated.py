"""Generated parts of the site.

A page's line ``<!-- commands -->`` becomes the command line's reference, and ``<!-- peers -->`` the table of the peers'
tested settings. In the repository each page says where to find them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from magicrl.commands.main import app


def commands() -> str:
    """Return the help of every command as Markdown, one heading each."""
    text = app.generate_docs(output_format="markdown", heading_level=2)
    text = "".join(text.partition("\n### magicrl ")[1:])
    text = text.replace("\n**Parameters**:\n", "").replace("\n**Arguments**:\n", "")
    text = re.sub(r"</?think>", r"`\g<0>`", text)
    return re.sub(r"^Examples?: (magicrl .*)$", r"```console\n$ \1\n```", text, flags=re.MULTILINE)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TRIED = (("bench-rollout", "transformers"), ("bench-rollout-vllm", "vLLM"), ("bench-learner-tuning", "TRL"))


def peers() -> str:
    """Return a row per measured setting of a peer: case, peer, setting, CPU seconds; the fastest is the peer."""
    rows = ["| case | peer | setting | CPU seconds |", "|---|---|---|---|"]
    for file, peer in TRIED:
        for name, case in json.loads((RESULTS / f"{file}.json").read_text())["cases"].items():
            tried = case["peer"]["cpu_s"] if "peer" in case else case["cpu_s"]
            theirs = {key: seconds for key, seconds in tried.items() if not key.startswith("magicrl")}
            rows += [f"| {name} | {peer} | {key} | {seconds:g} |" for key, seconds in theirs.items()]
    return "\n".join(rows)


PARTS = {
    "commands": commands,
    "peers": peers,
}
"""Function that makes the part of each mark."""
