"""Model card of a trained model: how it was trained, on what, how well it did, how to load it.

``card_text`` is a pure function of the run's records, and ``model_card`` reads those from a run folder. The front
matter is that of the Hugging Face Hub, so that an uploaded folder is indexed under its base model and licence.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from magicrl.config.loader import config_hash, live_parts
from magicrl.config.schema import TrainConfig
from magicrl.training.curriculum import evaluation_tokens
from magicrl.training.diagnosis import ACCURACY, Conclusion, Measure, SampledAnswers, measure_of
from magicrl_verifiers.progress import plural
from magicrl_verifiers.secrets import without_secrets

CARD = "README.md"
RECIPE = "config.toml"
TAGS = ("magicrl", "reasoning")
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_MAGIC = "[MAGIC](https://arxiv.org/abs/2505.22312)"


def model_texts(folder: Path) -> dict[str, str]:
    """Return the text files of a run's saved model next to its card: resolved recipe, initial model's licence files."""
    start = Path(str(_run_document(folder)["start_model"]))
    found = [folder / RECIPE, *(start / name for name in _LICENCE_FILES if (start / name).is_file())]
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found}


def recommended_sampling(config: TrainConfig) -> dict[str, Any]:
    """Return generation settings as at the end of training: full distribution, its tau, the evaluation's limit."""
    return {
        "do_sample": True,
        "temperature": _temperatures(config)[-1],
        # Explicit, since transformers' default of top_k = 50, or a base model's settings, are another distribution.
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": evaluation_tokens(config),
    }


def model_card(config: TrainConfig, folder: Path, conclusion: Conclusion) -> str:
    """Return the card of the run in ``folder``: front matter and text, in Markdown."""
    documents = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "evaluations").glob("*.json"))
    ]
    return card_text(config, _run_document(folder), steps_done(folder), documents, conclusion, called_as(sys.argv))


def card_text(
    config: TrainConfig,
    run: Mapping[str, Any],
    done: Mapping[int, int],
    evaluations: Sequence[Mapping[str, Any]],
    conclusion: Conclusion,
    command: str | None,
) -> str:
    """Return a model card.

    Args:
        config: The recipe.
        run: Document of ``run.json``.
        done: Number of steps of each stage.
        evaluations: Documents of the evaluations.
        conclusion: Verdict on the run.
        command: Command line, or None if Python called.
    """
    start = str(run["start_model"])
    # Only the name of a folder: the card is shared, and a path belongs to this machine.
    local = Path(start).exists()
    name = Path(start).name if local else start
    hub_name = start if re.fullmatch(r"[\w.-]+/[\w.-]+", start) else None
    base = read_base_model(Path(start)) if local else hub_name
    stages = ", ".join(f"{done.get(i, 0)} at T = {stage.max_tokens}" for i, stage in enumerate(config.stages))
    steps = f"{plural(sum(done.values()), 'training step')} ({stages})"
    taus = " then ".join(f"{tau:g}" for tau, _ in groupby(_temperatures(config)))
    trained = conclusion.facts.updates > 0 and conclusion.facts.weights_changed is not False
    if trained:
        made = (
            "A causal language model trained with reinforcement learning on problems whose answers a program judges, "
            f"by magicrl with the recipe {_MAGIC}, from **{name}**: {steps}, sampled at temperature {taus}, loss "
            f"`{config.algorithm.loss}`."
        )
    else:
        made = (
            f"The weights are those of **{name}**: a run of magicrl with the recipe {_MAGIC} ended after {steps} "
            "without changing any weight."
        )
    tags = ("reinforcement-learning", "magic") if trained else ()
    return f"""{front_matter(licence=run.get("start_model_licence"), base=base, tags=tags)}
# {config.run.name}

{made}

## Did it learn?

**{conclusion.title.capitalize()}**: {conclusion.reason}.

## Measured

{_results(evaluations)}
## Use

{_use(config)}
## Made by

- {_made_by(config, command)} (`{RECIPE}` next to this card is the recipe with every default)
- recipe: {config.run.name}, seed {config.run.seed}, configuration hash `{config_hash(config)}`
- initial model: {name}{f", base model {base}" if base else ""}
{_provenance(run)}
## Limits

{_limits(config, evaluations, conclusion.facts.answers) if trained else "- The initial model's licence applies."}
"""


def front_matter(*, licence: str | None, base: str | None, tags: Sequence[str]) -> str:
    """Return the YAML head of a card. A licence without an identifier of the Hub becomes ``other`` with its name."""
    known = licence is not None and re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence) is not None
    data = ModelCardData(
        license=(licence if known else "other" if licence else "unknown"),
        license_name=None if known or not licence else licence[:80],
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *tags],
    )
    return f"---\n{data.to_yaml().strip()}\n---\n"


def read_base_model(folder: Path) -> str | None:
    """Return the base model that the card in a model folder names, or None."""
    card = folder / CARD
    if not card.is_file():
        return None
    found = re.search(r"^base_model:\s*[\"']?([^\"'\n]+)", card.read_text(encoding="utf-8", errors="replace"), re.M)
    return found.group(1).strip() if found else None


def called_as(argv: Sequence[str]) -> str | None:
    """Return the command line as typed, with secrets masked; None if Python called."""
    if not argv or Path(argv[0]).name not in ("magicrl", "__main__.py"):
        return None
    return without_secrets(shlex.join(["magicrl", *argv[1:]]))


def steps_done(folder: Path) -> Counter[int]:
    """Return the recorded steps of each stage of the run in ``folder``, without truncated lines."""
    done: Counter[int] = Counter()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            done[int(json.loads(line)["stage"])] += 1
    return done


def _results(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return one table: every set and temperature, before and after, with 95 % intervals over problems."""
    by_set: dict[str, dict[str, Mapping[str, Any]]] = {}
    for document in evaluations:
        by_set.setdefault(str(document["set"]), {})[str(document["name"])] = document["temperatures"]
    rows: list[str] = []
    for label, tests in by_set.items():
        before, after = tests.get("before", {}), tests.get("after", {})
        for key in after:
            what = "greedy" if float(key) == 0 else f"temperature {float(key):g}, mean of {after[key]['samples']}"
            old = before.get(key, {})
            measure = measure_of(rewards=[old.get("reward"), after[key].get("reward")])
            rows.append(
                f"| {label} ({after[key]['problems']} problems) | {measure.name}, {what} "
                f"| {_interval(measure.of(old), measure)} | {_interval(measure.of(after[key]), measure)} |"
            )
            for k, estimate in after[key].get("pass_at", {}).items():
                was = old.get("pass_at", {}).get(k)
                rows.append(f"| {label} | pass@{k} | {_interval(was)} | {_interval(estimate)} |")
    if not rows:
        return "The recipe names no test set: nothing was measured on held-out problems.\n"
    head = "| test set | measured | before | after |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n\nIn brackets: 95 % intervals over problems.\n"


def _interval(estimate: Mapping[str, float] | None, measure: Measure = ACCURACY) -> str:
    if estimate is None:
        return "–"
    if estimate["low"] == estimate["high"]:
        return measure.value(estimate["mean"])
    return f"{measure.value(estimate['mean'])} ({measure.bare(estimate['low'])} to {measure.bare(estimate['high'])})"


def _use(config: TrainConfig) -> str:
    templates = dict.fromkeys(source.template for source in config.data.train)
    around = "".join(
        "\nThe prompts of training were written as:\n\n" + "".join(f"    {line}\n" for line in text.splitlines())
        for text in templates
        if text not in (None, "{prompt}")
    )
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = "..."
if tokenizer.chat_template:
    message = [{{"role": "user", "content": prompt}}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
```

`generation_config.json` samples as in training: temperature {_temperatures(config)[-1]:g}, whole distribution, at \
most {evaluation_tokens(config)} new tokens.
{around}"""


def _made_by(config: TrainConfig, command: str | None) -> str:
    live = sorted(set(live_parts(config).values()))
    if live:
        return f"made in Python, with `{'`, `'.join(live)}` passed there: no command can reproduce it"
    return f"command: `{command or f'magicrl train {RECIPE}'}`"


def _provenance(run: Mapping[str, Any]) -> str:
    environments = run["environments"]
    last, resumes = environments[-1], len(environments) - 1
    commits = dict.fromkeys("no git" if e.get("git") is None else f"commit `{e['git']}`" for e in environments)
    versions = ", ".join(f"{name} {version}" for name, version in (last.get("versions") or {}).items())
    lines = [
        f"- magicrl source: {' then '.join(commits)}",
        f"- versions: Python {last.get('python')}, {versions}",
        f"- machine: {environments[0].get('machine')}" + (f"; resumed {resumes} times" if resumes else ""),
        "- data (SHA-256 of the problems):",
        *(
            f"  - {name}: {entry['problems']} problems, `{entry['sha256']}`"
            for name, entry in run["data"].items()
            if entry["problems"]
        ),
    ]
    return "\n".join(lines) + "\n"


def _limits(config: TrainConfig, evaluations: Sequence[Mapping[str, Any]], answers: SampledAnswers | None) -> str:
    sets = ", ".join(sorted({str(document["set"]) for document in evaluations})) or "nothing"
    judged = (
        "verified final answers: the reasoning before an answer was never judged, and may be wrong although the answer "
        "is correct"
        if answers is None or answers.reward is None
        else "scores: what the reward function does not look at was never judged"
    )
    return (
        f"- Measured on {sets} only, with one seed; other tasks may have become better or worse.\n"
        f"- Rewards were {judged}.\n"
        f"- Trained with responses of at most {max(stage.max_tokens for stage in config.stages)} tokens.\n"
        "- No safety training was added; the initial model's limits and licence apply."
    )


def _temperatures(config: TrainConfig) -> list[float]:
    """Return tau of each stage's rollouts."""
    return [config.in_stage(index).rollout.temperature for index in range(len(config.stages))]


def _run_document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))
