"""A second, slow implementation of a training run that shares no code with the trainer.

Its input is a recipe, the starting model's folder, the problems and the tokens that a run recorded. It computes
everything else again: which prompts were drawn, that each token is the one that its random number picks, rewards,
entropies, alpha and c, rejection, refill, advantages, mini-batches, losses, gradients, AdamW, stages and filters. It
handles one response at a time, in float64, with plain autograd. From magicrl it uses only the engine's random numbers
(a function of seed, draw, sample and position with known answers).

Symbols are those of docs: tau, T, M (group size), D_R, D_T, rho, A, alpha, c, beta.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slow_convergence import upper_bound
from slow_policy import Policy, Weights
from slow_updates import Sums, merged
from torch import Tensor

from magicrl.rollout.sampling import uniforms

NEAR = 2e-5
"""How far a random number may lie outside its token's interval of the cumulative distribution, because of rounding."""

CLIPS = {"magic": (0.2, 0.2), "ppo": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}
CLIPS |= {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "scalerl": (1.0, 4.0), "pg": (math.inf, math.inf)}


# ------------------------------------------------------------------------------------------------------ records


@dataclass
class Response:
    """One recorded response with the values that the slow loop computes."""

    tokens: list[int]
    truncated: bool
    answered: bool  # it ended by itself and is not empty
    judged: bool
    reward: float
    versions: list[int]  # version of the weights that sampled each token
    spans: bool  # an update arrived while it was sampled
    sampler_logprobs: Tensor  # under the weights that sampled
    entropies: Tensor  # under the weights that sampled; asynchronous, under the learner's at the start of the step
    advantage: float = 0.0
    old: Tensor | None = None
    ref: Tensor | None = None


@dataclass
class Group:
    draw: int
    problem: str
    prompt: list[int]
    responses: list[Response]

    @property
    def judged(self) -> list[Response]:
        """Return the judged responses. The others leave their group."""
        return [r for r in self.responses if r.judged]


@dataclass
class Stage:
    """Position of the run in its stages."""

    index: int = 0
    steps: int = 0
    converged: bool = False
    curve: list[tuple[int, float, float | None]] = field(default_factory=list)
    below: int = 0


def problems_of(path: Path) -> dict[str, tuple[str, str]]:
    """Return prompt and reference answer by id (the file's name and the row's number), in the file's order."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {f"{path.stem}-{number}": (row["problem"], row["answer"]) for number, row in enumerate(rows)}


# ------------------------------------------------------------------------------------------------------ the loop


class SlowLoop:
    """The run of ``recipe`` (a parsed TOML that states every setting it uses).

    Args:
        recipe: The recipe.
        model: The starting model's folder, which is also the reference.
        train: Prompt and reference answer by id.
        validation: The same for validation problems, which are answered greedily.
        unjudged: Function of reference answer and text that says whether the run's verifier could not judge it.
    """

    def __init__(
        self,
        recipe: Mapping[str, Any],
        model: Path,
        train: Mapping[str, tuple[str, str]],
        validation: Mapping[str, tuple[str, str]],
        unjudged: Callable[[str, str], bool] = lambda _reference, _text: False,
    ) -> None:
        self.recipe = recipe
        self.unjudged = unjudged
        self.policy = Policy(model)
        self.train, self.validation = train, validation
        self.weights = {name: w.clone() for name, w in self.policy.start.items()}
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.updates = 0
        self.by_version = {0: self.weights}  # weights that the engine received
        self.pending: list[tuple[int, str]] = []  # requested draws that are not used yet, with their problems
        self.again: list[str] = []  # problems whose draws were discarded at the end of a stage
        self.drained = 0
        self.steps = 0
        self.c = 0.0
        self.previous: float | None = None
        self.draws = 0
        self.epoch, self.place = 0, 0
        self.removed: list[str] = []
        self.visits: dict[str, tuple[int, int]] = {}  # correct and judged responses of a prompt's last visit
        self.stage = Stage()
        self.best: tuple[int, float] | None = None
        self.events: list[dict[str, Any]] = []

    # -------------------------------------------------------------------------------------------------- rollouts

    @property
    def tau(self) -> float:
        return self.stated("temperature", "rollout")

    @property
    def target(self) -> float:
        return self.stated("entropy_target", "entropy", "target")

    def stated(self, own: str, table: str, key: str | None = None) -> Any:
        """Return the value of the current stage, else that of the recipe's table, else None."""
        return self.now.get(own, self.recipe[table].get(key or own))

    @property
    def now(self) -> Mapping[str, Any]:
        """Return the current stage's settings."""
        return self.recipe["stages"][self.stage.index]

    @property
    def ahead(self) -> int:
        """Return the number of steps that are requested in advance: 0 is the synchronous run."""
        return self.recipe["rollout"].get("max_staleness", 0)

    @property
    def served(self) -> int:
        """Return the version that the engine samples with at the start of a step."""
        given = sorted(self.by_version)
        return given[max(0, len(given) - 1 - self.recipe["rollout"].get("weight_lag", 0))]

    def _next_problem(self) -> str:
        if self.again:
            return self.again.pop(0)
        names = list(self.train)
        while True:
            if self.place == len(names):
                self.epoch, self.place = self.epoch + 1, 0
            seeds = np.random.SeedSequence([self.recipe["run"]["seed"], self.epoch])
            order = np.random.Generator(np.random.PCG64(seeds)).permutation(len(names))
            name = names[order[self.place]]
            self.place += 1
            if name not in self.removed:
                return name

    @torch.no_grad()
    def _asked(self, count: int, recorded: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[Group]:
        """Return the next ``count`` groups. The seed decides the prompts, and the record holds the responses."""
        left = max(0, min(self.ahead, self.now["max_steps"] - self.stage.steps - 1))
        for _ in range(count + left * self.now["rollout_batch"] - len(self.pending)):
            self.pending.append((self.draws, self._next_problem()))
            self.draws += 1
        groups: list[Group] = []
        for draw, name in self.pending[:count]:
            text, reference = self.train[name]
            prompt = self.policy.encode(text)
            responses: list[Response] = []
            for sample in range(self.now["group_size"]):
                row = recorded[draw, sample]
                assert row["problem_id"] == name, f"draw {draw} asked {row['problem_id']}, not {name}"
                assert row["prompt_tokens"] == prompt
                responses.append(self._response(row, reference))
            groups.append(Group(draw, name, prompt, responses))
        self.pending = self.pending[count:]
        return groups

    def _response(self, row: Mapping[str, Any], reference: str) -> Response:
        tokens, prompt, limit = row["tokens"], row["prompt_tokens"], self.now["max_tokens"]
        stopped = tokens[-1] == self.policy.end
        assert self.policy.end not in tokens[:-1], "a response went on after its end"
        assert len(tokens) <= limit
        assert stopped or len(tokens) == limit, "a response was cut before T"
        spans = row["version_spans"] or [row["policy_version"], len(tokens)]
        versions = [v for v, n in zip(spans[::2], spans[1::2], strict=True) for _ in range(n)]
        assert versions[0] == row["policy_version"]
        assert len(versions) == len(tokens)
        assert self.ahead or versions == [self.served] * len(tokens)
        table = self.policy.distribution(self.by_version[versions[0]], prompt, tokens, self.tau)
        # later weights continue with keys and values of earlier ones: their samples are taken as recorded
        self._check_sampling(table[: spans[1]], row)
        sampler_logprobs = torch.tensor(row["sampler_logprobs"]).double()
        sampler_logprobs[: spans[1]] = table[torch.arange(len(tokens)), torch.tensor(tokens)][: spans[1]]
        text = self.policy.decode(tokens)
        words, judged = text.split(), not self.unjudged(reference, text)
        if self.ahead:
            table = self.policy.distribution(self.weights, prompt, tokens, self.tau)
        return Response(
            tokens=tokens,
            truncated=not stopped,
            answered=stopped and bool(words),
            judged=judged,
            reward=float(stopped and judged and words[-1:] == [reference]),
            versions=versions,
            spans=bool(row["version_spans"]),
            sampler_logprobs=sampler_logprobs,
            entropies=-(table.exp() * table).sum(-1),
        )

    def _check_sampling(self, table: Tensor, row: Mapping[str, Any]) -> None:
        """Check that each token is the one that its random number picks from the cumulative distribution."""
        draw, sample = row["draw"], row["sample"]
        numbers = uniforms(self.recipe["run"]["seed"], draw, sample, np.arange(len(table)))
        for place, (token, number) in enumerate(zip(row["tokens"][: len(table)], numbers, strict=True)):
            edges = torch.cat([torch.zeros(1), table[place].exp().cumsum(0)])
            assert edges[token] - NEAR <= number <= edges[token + 1] + NEAR, (
                f"token {place} of sample {sample} of draw {draw} is not what was drawn: {number} is not "
                f"between {float(edges[token])} and {float(edges[token + 1])}"
            )

    # -------------------------------------------------------------------------------------------------- a step

    def step(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
        """Make one training step from the recorded ``rows`` of its buffer, and return its metrics."""
        algorithm, stage = self.recipe["algorithm"], self.now
        recorded = {(row["draw"], row["sample"]): row for row in rows}
        groups = self._asked(stage["rollout_batch"], recorded)
        for _ in range(algorithm["refill_rounds"] if algorithm["refill"] == "until_full" else 0):
            missing = stage["rollout_batch"] - sum(self._teaches(group) for group in groups)
            if missing > 0:
                groups += self._asked(missing, recorded)
        assert len(recorded) == len(groups) * stage["group_size"], "the run sampled another number of groups"
        for group in groups:
            right = [r.reward for r in group.judged]
            if right:
                self.visits[self._prompt(group.problem)] = (int(sum(right)), len(right))

        values = self._rollout_values(groups)
        estimates = self._entropy_values(groups)
        values |= estimates
        alpha = self._alpha(estimates[f"entropy/{self.recipe['entropy']['estimator']}/mean"])
        values["entropy/alpha"] = alpha
        if self.recipe["entropy"]["controller"] == "adaptive":
            values |= {"entropy/c": self.c, "entropy/target": self.target}

        kept = [group for group in groups if self._teaches(group)]
        values["groups/rejected/ratio"] = 1 - len(kept) / len(groups)
        values["groups/rejected/all_correct"] = sum(self._reason(g) == "right" for g in groups)
        values["groups/rejected/all_wrong"] = sum(self._reason(g) == "wrong" for g in groups)
        spent = [sum(len(r.tokens) for r in group.responses) for group in groups]
        useless = sum(count for group, count in zip(groups, spent, strict=True) if not self._teaches(group))
        values["tokens/rejected/ratio"] = useless / sum(spent)
        values["groups/refilled"] = len(groups) - stage["rollout_batch"]
        if not algorithm["reject_zero_advantage"]:
            kept = [group for group in groups if group.judged]
        kept = kept[: stage["rollout_batch"]]
        values["groups/trained"] = len(kept)
        values["groups/all_rejected"] = int(not kept)
        values["stage/max_tokens"] = stage["max_tokens"]
        for group in kept:
            self._give_advantages(group)
        if algorithm.get("advantage") == "batch_std":
            given = [r.advantage for g in kept for r in self._members(g)]
            mean = sum(given) / max(1, len(given))
            deviation = math.sqrt(sum((a - mean) ** 2 for a in given) / max(1, len(given) - 1))
            for response in (r for g in kept for r in g.responses):
                response.advantage /= deviation + 1e-6
        self._give_logprobs(kept)
        values |= self._learn(kept, alpha)
        self._move_c(estimates[f"entropy/{self.recipe['entropy']['estimator']}/mean"])
        if self.ahead:
            values |= self._staleness_values(groups)
            self.drained = 0
        self.by_version[self.updates] = self.weights
        self.steps += 1

        left = len(self.train) - len(self.removed)
        accuracy = values["train/accuracy/mean"]
        values["train/accuracy_unfiltered/mean"] = (accuracy * left + len(self.removed)) / len(self.train)
        values |= self._validated()
        self._advance_stage(values)
        return values

    def _members(self, group: Group) -> list[Response]:
        """Return the responses that make up a group's mean and deviation."""
        before = self.recipe["algorithm"]["advantage_mask"] == "before"
        return [r for r in group.judged if not (before and r.truncated)]

    def _reason(self, group: Group) -> str:
        rewards = {r.reward for r in self._members(group)}
        if len(self._members(group)) < 2:
            return "too few"
        return "mixed" if len(rewards) > 1 else "right" if rewards == {1.0} else "wrong"

    def _teaches(self, group: Group) -> bool:
        return self._reason(group) == "mixed"

    def _give_advantages(self, group: Group) -> None:
        members = self._members(group)
        for response in group.responses:
            response.advantage = 0.0
        if self._reason(group) != "mixed":
            return
        rewards = [self._shaped(r) for r in members]
        if len(set(rewards)) == 1:
            return
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        algorithm = self.recipe["algorithm"]
        for response, reward in zip(members, rewards, strict=True):
            response.advantage = reward - mean
            if algorithm["loss"] != "dr_grpo" and algorithm.get("advantage") != "batch_std":
                response.advantage /= deviation + 1e-6
            if algorithm["advantage_mask"] == "after" and response.truncated:
                response.advantage = 0.0

    def _shaped(self, response: Response) -> float:
        """Return the reward for the advantage: the recipe may subtract up to 1 over the last tokens before T."""
        buffer = self.recipe["algorithm"].get("overlong_buffer")
        if buffer is None or len(response.tokens) <= self.now["max_tokens"] - buffer:
            return response.reward
        return response.reward - (len(response.tokens) - self.now["max_tokens"] + buffer) / buffer

    @torch.no_grad()
    def _give_logprobs(self, kept: Sequence[Group]) -> None:
        for group in kept:
            for response in group.judged:
                response.old = self.policy.score(self.weights, group.prompt, response.tokens, self.tau)[0]
                mode = self.recipe["reference"]["mode"]
                if mode == "monitor" or (mode == "loss" and self.now.get("kl_coefficient") != 0):
                    response.ref = self.policy.score(self.policy.start, group.prompt, response.tokens, self.tau)[0]

    # -------------------------------------------------------------------------------------------------- metrics

    def _rollout_values(self, groups: Sequence[Group]) -> dict[str, Any]:
        responses = [r for group in groups for r in group.responses]
        rewards = [r.reward for r in responses if r.judged]
        whole = [r.reward for r in responses if r.judged and not r.truncated]
        lengths = sorted(len(r.tokens) for r in responses)
        shares = [sum(r.reward for r in g.judged) / len(g.judged) for g in groups if g.judged]
        mean = sum(shares) / len(shares)
        of_prompt: dict[tuple[int, ...], float] = {}  # a prompt that was drawn twice is one observation
        for group, share in zip([g for g in groups if g.judged], shares, strict=True):
            of_prompt[tuple(group.prompt)] = of_prompt.get(tuple(group.prompt), 0.0) + share - mean
        spread = math.sqrt(sum(r**2 for r in of_prompt.values()) * len(of_prompt) / (len(of_prompt) - 1))

        def quantile(q: float) -> float:
            place = q * (len(lengths) - 1)
            low = math.floor(place)
            high = min(low + 1, len(lengths) - 1)
            return lengths[low] + (place - low) * (lengths[high] - lengths[low])

        def mean_length(reward: float) -> float | None:
            found = [len(r.tokens) for r in responses if r.judged and r.reward == reward]
            return sum(found) / len(found) if found else None

        return {
            "train/accuracy/mean": sum(rewards) / len(rewards),
            "train/accuracy/standard_error": spread / len(shares),
            "train/accuracy_nontruncated/mean": sum(whole) / len(whole) if whole else None,
            "train/reward/mean": sum(rewards) / len(rewards),
            "train/answered/ratio": sum(r.answered for r in responses) / len(responses),
            "train/truncation/ratio": sum(r.truncated for r in responses) / len(responses),
            "length/mean": sum(lengths) / len(lengths),
            "length/min": lengths[0],
            "length/max": lengths[-1],
            **{f"length/q{round(100 * q)}": quantile(q) for q in (0.5, 0.9, 0.99)},
            "length/right/mean": mean_length(1.0),
            "length/wrong/mean": mean_length(0.0),
            "groups/sampled": len(groups),
            "train/not_judged/ratio": sum(not r.judged for r in responses) / len(responses),
            "tokens/sampled": sum(lengths),
        }

    def _entropy_values(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mean over all tokens of the buffer, and its error by a linearised ratio of sums over responses."""
        found: dict[str, float] = {}
        responses = [r for group in groups for r in group.responses]
        for name in ("exact",) if self.ahead else ("exact", "sampled"):
            totals = [float((r.entropies if name == "exact" else -r.sampler_logprobs).sum()) for r in responses]
            tokens = sum(len(r.tokens) for r in responses)
            mean = sum(totals) / tokens
            squares = sum((s - mean * len(r.tokens)) ** 2 for s, r in zip(totals, responses, strict=True))
            found[f"entropy/{name}/mean"] = mean
            found[f"entropy/{name}/standard_error"] = (
                math.sqrt(squares * len(responses) / (len(responses) - 1)) / tokens
            )
        return found

    def _staleness_values(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return how many weight changes ago tokens were sampled, by the versions at the starts of the steps."""
        given = sorted(self.by_version)
        responses = [(g, r) for g in groups for r in g.responses]
        ages = [len(given) - 1 - given.index(v) for _, r in responses for v in r.versions]
        begun = [len(given) - 1 - given.index(r.versions[0]) for _, r in responses]
        start = self.by_version[given[-1]]
        gaps: list[float] = []
        for group, r in responses:
            if r.versions[0] == given[-1]:
                now = self.policy.score(start, group.prompt, r.tokens, self.tau)[0].detach()
                gaps += (now - r.sampler_logprobs).abs().tolist()
        left = max(0, min(self.ahead, self.now["max_steps"] - self.stage.steps - 1))
        return {
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": max(begun),
            "staleness/begun/mean": sum(begun) / len(begun),
            "staleness/older/ratio": sum(age > 0 for age in ages) / len(ages),
            "staleness/spanning/ratio": sum(r.spans for _, r in responses) / len(responses),
            **{f"staleness/share_{n}/ratio": ages.count(n) / len(ages) for n in range(self.ahead + 1)},
            "staleness/fresh_gap/mean": sum(gaps) / len(gaps) if gaps else None,
            "queue/in_flight": left * self.now["rollout_batch"],
            "queue/drained": self.drained,
        }

    def _alpha(self, entropy: float) -> float:
        settings = self.recipe["entropy"]
        if settings["controller"] == "none":
            return 0.0
        if settings["controller"] == "fixed":
            return settings["alpha"]
        return self.c if entropy <= self.target else 0.0

    def _move_c(self, entropy: float) -> None:
        settings = self.recipe["entropy"]
        if settings["controller"] == "adaptive":
            self.c += settings["step"] * ((entropy < self.target) - (entropy > self.target))
            self.c = min(max(self.c, 0.0), settings["maximum"])

    # -------------------------------------------------------------------------------------------------- updates

    def _learn(self, kept: Sequence[Group], alpha: float) -> dict[str, Any]:
        algorithm, stage = self.recipe["algorithm"], self.now
        parts = stage["rollout_batch"] // stage["mini_batch"]
        told: list[dict[str, float]] = []
        reuse = self.stated("reuse", "algorithm")
        for turn in range(reuse):
            seeds = [self.recipe["run"]["seed"], self.steps, turn]
            order = np.random.Generator(np.random.PCG64(seeds)).permutation(len(kept)).tolist()
            if algorithm["minibatch"] == "keep_n_sgd":
                size, more = divmod(len(kept), min(parts, max(len(kept), 1)))
                sizes = [size + (i < more) for i in range(min(parts, len(kept)))]
            else:
                sizes = [stage["mini_batch"]] * math.ceil(len(kept) / stage["mini_batch"])
            for size in sizes:
                chosen, order = order[:size], order[size:]
                told.append(self._update([kept[i] for i in chosen], alpha, several=parts * reuse > 1))
        return merged(told)

    def _update(self, groups: Sequence[Group], alpha: float, *, several: bool) -> dict[str, float]:
        """Make one SGD step on these groups: loss, gradient, clipping, AdamW."""
        for weight in self.weights.values():
            weight.requires_grad_(True)
        beta = self.stated("kl_coefficient", "reference", "coefficient") or 0.0
        sums = Sums()
        kept = self._second_moment(groups)
        loss, policy_loss = torch.zeros(()).double(), torch.zeros(()).double()
        for group in groups:
            for response in group.judged:
                weight = self._token_weight(response, group, groups)
                logprobs, entropies = self.policy.score(self.weights, group.prompt, response.tokens, self.tau)
                assert response.old is not None
                old = response.old if several else logprobs.detach()
                correction = self._correction(old - response.sampler_logprobs, response.advantage, kept)
                objective, rho, clipped = self._surrogate(logprobs, old, response.advantage)
                kl = None
                if response.ref is not None:
                    r = (response.ref - logprobs).exp()
                    kl = r - (response.ref - logprobs) - 1
                policy_loss = policy_loss - weight * (correction * objective).sum()
                loss = loss - weight * alpha * entropies.sum()
                if kl is not None:
                    loss = loss + weight * beta * kl.sum()
                sums.add(rho, clipped, entropies, kl, old - response.sampler_logprobs, correction)
        loss = loss + policy_loss
        loss.backward()
        gradients = {name: w.grad for name, w in self.weights.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        rate = self._rate()
        self._adamw(gradients, norm, rate)
        return {
            "loss": float(loss.detach()),
            "policy_loss": float(policy_loss.detach()),
            **sums.values(corrected=self.recipe["algorithm"]["correction"] != "none"),
            "grad_norm": norm,
            "learning_rate": rate,
        }

    def _token_weight(self, response: Response, group: Group, groups: Sequence[Group]) -> float:
        loss = self.recipe["algorithm"]["loss"]
        if loss in ("magic", "dapo", "cispo"):
            return 1 / sum(len(r.tokens) for g in groups for r in g.judged)
        if loss == "dr_grpo":
            return 1 / (self.now["max_tokens"] * len(groups) * len(group.judged))
        if loss == "scalerl":
            return 1 / (len(groups) * sum(len(r.tokens) for r in group.judged))
        each = 1 / (len(groups) * len(group.judged))
        return each if loss in ("pg", "ppo") else each / len(response.tokens)

    def _second_moment(self, groups: Sequence[Group]) -> float:
        """Return m2po's threshold: the largest kept square of a log weight that moved with the advantage."""
        if self.recipe["algorithm"]["correction"] != "m2po":
            return math.inf
        squares: list[float] = []
        for response in (r for g in groups for r in g.judged):
            assert response.old is not None
            for log_weight in (response.old - response.sampler_logprobs).tolist():
                if log_weight * response.advantage > 0:
                    squares.append(log_weight**2)
        squares.sort()
        left = math.inf
        while squares and sum(squares) / len(squares) > self.recipe["algorithm"]["second_moment"]:
            left = squares.pop()
        # responses with the same beginning have equal weights there, and rounding decides which of them is masked first
        largest = squares[-1] if squares else 0.0
        assert left > largest * (1 + 1e-4), "the threshold separates equal weights; take another one"
        return largest

    def _correction(self, log_weights: Tensor, advantage: float, kept: float) -> Tensor:
        algorithm = self.recipe["algorithm"]
        if algorithm["correction"] == "none":
            return torch.ones_like(log_weights)
        weights = log_weights.exp()
        if algorithm["correction"] == "m2po":
            return weights * ((log_weights**2 <= kept) | (log_weights * advantage <= 0))
        cap = algorithm["correction_cap"]
        return weights.clamp(max=cap) if algorithm["correction"] == "tis" else weights * (weights <= cap)

    def _surrogate(self, logprobs: Tensor, old: Tensor, advantage: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the maximised objective ``[T]``, rho, and the tokens whose gradient the clip zeroed."""
        algorithm = self.recipe["algorithm"]
        low, high = CLIPS[algorithm["loss"]]
        low, high = self.stated("clip_low", "algorithm") or low, self.stated("clip_high", "algorithm") or high
        rho = (logprobs - old).exp()
        if algorithm["loss"] == "gspo":
            rho = (logprobs - old).mean().exp().expand(len(logprobs))
        if algorithm["loss"] in ("cispo", "scalerl"):
            bounded = rho.detach().clamp(1 - low, 1 + high)
            return bounded * advantage * logprobs, rho.detach(), bounded != rho.detach()
        if algorithm["loss"] == "pg":
            return rho * advantage, rho.detach(), torch.zeros(len(rho), dtype=torch.bool)
        values = torch.minimum(rho * advantage, rho.clamp(1 - low, 1 + high) * advantage)
        beyond = rho > 1 + high if advantage > 0 else rho < 1 - low
        return values, rho.detach(), beyond & (advantage != 0)

    def _rate(self) -> float:
        settings = self.recipe["optimizer"]
        warm_up = settings["warmup_steps"]
        return self.stated("learning_rate", "optimizer") * (min(1.0, (self.updates + 1) / warm_up) if warm_up else 1.0)

    def _adamw(self, gradients: Mapping[str, Tensor | None], norm: float, rate: float) -> None:
        settings = self.recipe["optimizer"]
        self.updates += 1
        scale = min(1.0, settings["max_grad_norm"] / norm) if norm else 1.0
        fresh: Weights = {}
        for name, weight in self.weights.items():
            gradient = gradients[name]
            assert gradient is not None
            gradient = gradient * scale
            self.first[name] = settings["beta1"] * self.first[name] + (1 - settings["beta1"]) * gradient
            self.second[name] = settings["beta2"] * self.second[name] + (1 - settings["beta2"]) * gradient**2
            first = self.first[name] / (1 - settings["beta1"] ** self.updates)
            second = self.second[name] / (1 - settings["beta2"] ** self.updates)
            decayed = weight.detach() * (1 - rate * settings["weight_decay"])
            fresh[name] = decayed - rate * first / (second.sqrt() + settings["eps"])
        self.weights = fresh

    # -------------------------------------------------------------------------------------------------- stages

    @torch.no_grad()
    def _validated(self) -> dict[str, float]:
        """Return the metrics of greedy answers to the validation problems, where a validation is due."""
        every = self.recipe["evaluation"]["every"]
        if not every or self.steps % every:
            return {}
        limit = self.recipe["stages"][-1]["max_tokens"]
        right: list[float] = []
        lengths: list[int] = []
        cut: list[float] = []
        entropies: list[Tensor] = []
        for text, reference in self.validation.values():
            prompt = self.policy.encode(text)
            tokens = self.policy.greedy(self.weights, prompt, limit)
            words = self.policy.decode(tokens).split()
            stopped = tokens[-1] == self.policy.end
            right.append(float(stopped and words[-1:] == [reference]))
            lengths.append(len(tokens))
            cut.append(float(not stopped))
            entropies.append(self.policy.score(self.weights, prompt, tokens, 1.0)[1])
        mean = sum(right) / len(right)
        if self.best is None or mean > self.best[1]:
            self.best = (self.steps, mean)
        return {
            "validation/accuracy/mean": mean,
            "validation/accuracy/standard_error": math.sqrt(mean * (1 - mean) / (len(right) - 1)),
            "validation/length/mean": sum(lengths) / len(lengths),
            "validation/truncation/ratio": sum(cut) / len(cut),
            "validation/entropy/mean": float(torch.cat(entropies).mean()),
        }

    def _advance_stage(self, values: Mapping[str, Any]) -> None:
        rule, stage = self.now["transition"], self.stage
        if rule["rule"] == "truncation":
            stage.below = stage.below + 1 if values["train/truncation/ratio"] < rule["truncation_below"] else 0
            stage.converged = stage.below >= rule["window"]
        point: tuple[float, float | None] | None = None
        if "validation/accuracy/mean" in values:
            point = (values["validation/accuracy/mean"], values["validation/accuracy/standard_error"])
        elif not self.recipe["evaluation"]["every"]:
            left, error = len(self.train) - len(self.removed), values["train/accuracy/standard_error"]
            error = None if error is None else error * left / len(self.train)
            point = (values["train/accuracy_unfiltered/mean"], error)
        if rule["rule"] == "converged" and point is not None:
            stage.curve.append((stage.steps, *point))
            if not stage.converged and len(stage.curve) % rule["window"] == 0:
                stage.converged = upper_bound(stage.curve, rule) < rule["delta"]
        stage.steps += 1
        early = stage.converged and stage.steps >= self.now["min_steps"]
        if not early and stage.steps < self.now["max_steps"]:
            return
        self.events.append({"kind": "stage_end", "stage": stage.index, "steps": stage.steps, "early": early})
        self.stage = Stage(index=stage.index + 1)
        if self.stage.index < len(self.recipe["stages"]):
            self._remove_solved()
        self.again += [name for _, name in self.pending if name not in self.removed]
        self.drained, self.pending = len(self.pending), []

    def _prompt(self, name: str) -> str:
        return " ".join(self.train[name][0].split())

    def _remove_solved(self) -> None:
        if self.recipe["data"]["online_filter"]:
            solved = [prompt for prompt, (right, judged) in self.visits.items() if right == judged]
            gone = [name for name in self.train if self._prompt(name) in solved and name not in self.removed]
            left = len(self.train) - len(self.removed) - len(gone)
            self.removed += gone
            self.events.append({"kind": "filter", "removed": len(gone), "kept": left})
        self.visits = {}


def prompts(count: int, seed: str) -> list[str]:
    """Return distinct prompts of nine digits, which the tiny reasoner can read."""
    found: list[str] = []
    while len(found) < count:
        digits = [b % 10 for b in hashlib.sha256(f"{seed}/{len(found)}".encode()).digest()[:9]]
        found.append(" ".join(["L", *map(str, digits), ":"]))
    return found
