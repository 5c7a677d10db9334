"""The model card of a trained model: what made it, on what, how well it did, how to load it.

``model_card`` is a pure function of ``RunFacts``; ``run_facts`` reads them from a run folder. The front matter is the
Hugging Face Hub's, so that an uploaded folder is indexed under its base model and licence.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from magicrl.config.errors import without_secrets
from magicrl.config.loader import config_hash
from magicrl.config.schema import TrainConfig
from magicrl.training.diagnosis import Conclusion

CARD = "README.md"
RECIPE = "config.toml"
TAGS = ("magicrl", "reasoning")
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a card says of a run.

    Attributes:
        name, seed, config_hash: of the recipe.
        loss, temperature: its loss row and the sampling temperature of training.
        stages: response limit T in tokens and steps done, one pair a stage.
        start: folder name or hub name of the start model.
        base: hub name of the model that the weights go back to, if it is known.
        licence: of the start model, as its card or licence file has it.
        data: problems and SHA-256 of every set, by name.
        environments: those the run went through, the first one first (``git``, ``versions``, ``machine``, ``python``).
        evaluations: the documents of the tests.
        max_tokens: response limit of the test, which the generation config recommends.
        templates: the text around the prompts of training, where there is any.
        conclusion: the verdict on the run.
        command: the command line, None where the run was called from Python.
    """

    name: str
    seed: int
    config_hash: str
    loss: str
    temperature: float
    stages: tuple[tuple[int, int], ...]
    start: str
    base: str | None
    licence: str | None
    data: Mapping[str, Mapping[str, Any]]
    environments: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    max_tokens: int
    conclusion: Conclusion
    templates: tuple[str, ...] = ()
    command: str | None = None


def model_texts(folder: Path) -> dict[str, str]:
    """The text files of a run's saved model beside its card: resolved recipe, and the start model's licence files."""
    files = {RECIPE: (folder / RECIPE).read_text(encoding="utf-8")}
    start = Path(str(_run_document(folder)["start_model"]))
    for name in _LICENCE_FILES:
        if (start / name).is_file():
            files[name] = (start / name).read_text(encoding="utf-8", errors="replace")
    return files


def recommended_sampling(config: TrainConfig) -> dict[str, Any]:
    """Generation settings that sample as training did: whole distribution, its temperature, the test's limit.

    transformers' own default of ``top_k = 50``, or what a base model recommends, would be another distribution than
    the one that was trained and measured.
    """
    return {
        "do_sample": True,
        "temperature": config.rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": _test_tokens(config),
    }


def run_facts(config: TrainConfig, folder: Path, conclusion: Conclusion) -> RunFacts:
    """The facts of the run in ``folder``."""
    run = _run_document(folder)
    done = _steps_done(folder)
    start = str(run["start_model"])
    local = Path(start).exists()
    return RunFacts(
        name=config.run.name,
        seed=config.run.seed,
        config_hash=config_hash(config),
        loss=config.algorithm.loss,
        temperature=config.rollout.temperature,
        stages=tuple((stage.max_tokens, done[i]) for i, stage in enumerate(config.stages)),
        start=Path(start).name if local else start,
        base=read_base_model(Path(start)) if local else (start if _HUB_NAME.fullmatch(start) else None),
        licence=run.get("start_model_licence"),
        data=run["data"],
        environments=run["environments"],
        evaluations=[
            json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "evaluations").glob("*.json"))
        ],
        max_tokens=_test_tokens(config),
        conclusion=conclusion,
        templates=tuple(dict.fromkeys(s.template for s in config.data.train if s.template not in (None, "{prompt}"))),
        command=called_as(sys.argv),
    )


def model_card(facts: RunFacts) -> str:
    """The card: front matter and text, in Markdown."""
    trained = facts.conclusion.facts.updates > 0 and facts.conclusion.facts.weights_changed is not False
    parts = [
        front_matter(
            licence=facts.licence,
            base=facts.base,
            tags=("reinforcement-learning", "magic") if trained else (),
        ),
        f"# {facts.name}\n",
        _made(facts) if trained else _unchanged(facts),
        "## Did it learn?\n",
        f"**{facts.conclusion.title.capitalize()}**: {facts.conclusion.reason}.\n",
        "## Measured\n",
        _results(facts),
        "## Use\n",
        _use(facts),
        "## Made by\n",
        _provenance(facts),
        "## Limits\n",
        _limits(facts, trained=trained),
    ]
    return "\n".join(parts)


def _made(facts: RunFacts) -> str:
    return (
        "A causal language model trained with reinforcement learning on problems with verifiable answers, by magicrl "
        f"with the recipe [MAGIC](https://arxiv.org/abs/2505.22312), from **{facts.start}**: {_steps(facts)}, "
        f"sampled at temperature {facts.temperature:g}, loss `{facts.loss}`.\n"
    )


def _unchanged(facts: RunFacts) -> str:
    return (
        f"The weights are those of **{facts.start}**: a run of magicrl with the recipe "
        f"[MAGIC](https://arxiv.org/abs/2505.22312) ended after {_steps(facts)} without changing one.\n"
    )


def _steps(facts: RunFacts) -> str:
    stages = ", ".join(f"{done} at T = {limit}" for limit, done in facts.stages)
    return f"{sum(done for _, done in facts.stages)} training steps ({stages})"


def front_matter(*, licence: str | None, base: str | None, tags: Sequence[str]) -> str:
    """The YAML head of a card. A licence that is no identifier of the Hub becomes ``other`` with its words."""
    known = licence is not None and _LICENCE_ID.fullmatch(licence) is not None
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
    """The base model that the card in a model folder names, None if it names none."""
    card = folder / CARD
    if not card.is_file():
        return None
    found = re.search(r"^base_model:\s*[\"']?([^\"'\n]+)", card.read_text(encoding="utf-8", errors="replace"), re.M)
    return found.group(1).strip() if found else None


def called_as(argv: Sequence[str]) -> str | None:
    """The command line as one would type it, secrets masked; None where Python called."""
    if not argv or Path(argv[0]).name not in ("magicrl", "__main__.py"):
        return None
    return without_secrets(shlex.join(["magicrl", *argv[1:]]))


def _results(facts: RunFacts) -> str:
    """One table: every set and temperature, before and after, with the problem-level 95 % intervals."""
    by_set: dict[str, dict[str, Mapping[str, Any]]] = {}
    for document in facts.evaluations:
        by_set.setdefault(str(document["set"]), {})[str(document["name"])] = document["temperatures"]
    rows: list[str] = []
    for label, tests in by_set.items():
        before, after = tests.get("before", {}), tests.get("after", {})
        for key in after:
            what = "greedy" if float(key) == 0 else f"temperature {float(key):g}, mean of {after[key]['samples']}"
            old = before.get(key, {})
            rows.append(
                f"| {label} ({after[key]['problems']} problems) | accuracy, {what} "
                f"| {_interval(old.get('accuracy'))} | {_interval(after[key]['accuracy'])} |"
            )
            for k, estimate in after[key].get("pass_at", {}).items():
                was = old.get("pass_at", {}).get(k)
                rows.append(f"| {label} | pass@{k} | {_interval(was)} | {_interval(estimate)} |")
    if not rows:
        return "The recipe names no test set: nothing was measured on held-out problems.\n"
    head = "| test set | measured | before | after |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n\nIn brackets: 95 % intervals over problems.\n"


def _interval(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "–"
    mean, low, high = (100 * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"


def _use(facts: RunFacts) -> str:
    around = "".join(f"\nThe prompts of training were written as:\n\n{_quoted(text)}" for text in facts.templates)
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

`generation_config.json` samples as in training: temperature {facts.temperature:g}, whole distribution, at most \
{facts.max_tokens} new tokens.
{around}"""


def _quoted(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _provenance(facts: RunFacts) -> str:
    first, last = facts.environments[0], facts.environments[-1]
    commits = list(dict.fromkeys(str(environment.get("git")) for environment in facts.environments))
    versions = ", ".join(f"{name} {version}" for name, version in (last.get("versions") or {}).items())
    lines = [
        f"- command: `{facts.command or f'magicrl train {RECIPE}'}` (`{RECIPE}` beside this card is the recipe with "
        "every default written out)",
        f"- recipe: {facts.name}, seed {facts.seed}, configuration hash `{facts.config_hash}`",
        f"- start model: {facts.start}" + (f", base model {facts.base}" if facts.base else ""),
        f"- magicrl source: {' then '.join('commit `' + c + '`' if c != 'None' else 'no git' for c in commits)}",
        f"- versions: Python {last.get('python')}, {versions}",
        f"- machine: {first.get('machine')}"
        + (f"; resumed {len(facts.environments) - 1} times" if len(facts.environments) > 1 else ""),
        "- data (SHA-256 of the problems):",
        *(
            f"  - {name}: {entry['problems']} problems, `{entry['sha256']}`"
            for name, entry in facts.data.items()
            if entry["problems"]
        ),
    ]
    return "\n".join(lines) + "\n"


def _limits(facts: RunFacts, *, trained: bool) -> str:
    if not trained:
        return "- The start model's limits and licence hold.\n"
    sets = ", ".join(sorted({str(document["set"]) for document in facts.evaluations})) or "nothing"
    return (
        f"- Measured on {sets} only, with one seed; other tasks may have become better or worse.\n"
        "- Rewards were verified final answers: the reasoning before an answer was never judged, and may be wrong "
        "where the answer is right.\n"
        f"- Trained with responses of at most {max(limit for limit, _ in facts.stages)} tokens.\n"
        "- No safety training was added; the start model's limits and licence hold here, too.\n"
    )


def _steps_done(folder: Path) -> Counter[int]:
    """Recorded steps of each stage; a line that was torn is no step."""
    done: Counter[int] = Counter()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            done[int(json.loads(line)["stage"])] += 1
    return done


def _test_tokens(config: TrainConfig) -> int:
    return config.evaluation.max_tokens or config.stages[-1].max_tokens


def _run_document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))
