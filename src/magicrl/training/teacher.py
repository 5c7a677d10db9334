"""On-policy distillation: the log-probs that a teacher gives to the tokens that the policy sampled.

The loss adds ``coefficient * (log pi_teacher - log pi_old)`` to each token's advantage. Over sampled tokens the mean of
the difference is minus the reverse KL(pi || teacher), so the policy moves towards the teacher on its own responses (Lu
and Thinking Machines, "On-Policy Distillation", 2025; Agarwal et al., arXiv 2306.13649).

The teacher is a frozen model of the same tokenizer, a vLLM server, or the policy itself with a prompt that tells it
more, such as the reference answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from magicrl.config.algorithm_schema import TeacherConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import TrainConfig
from magicrl.models.loading import LoadedModel, described_model, load_policy, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.planning.costs import BF16, FLOAT32
from magicrl.records import FloatArray, Problem, TrainSample, frozen_floats, is_logprob
from magicrl.training.learner import ReferenceModel
from magicrl.training.objective import LearnerSettings, Objective
from magicrl.training.protocols import Learner
from magicrl_verifiers.served import ServerError, ServerSettings, ServerUsage, Transport

Teacher: TypeAlias = Callable[[Sequence[TrainSample], Sequence[Problem], float], Sequence[FloatArray]]
"""Takes samples, the problem of each, and the temperature. Returns the teacher's log-probs, ``[T]`` per sample."""
UNLIMITED = 2**31 - 1
"""Tokens of a teacher's prompt. The context of the model limits it, not ``data.max_prompt_tokens``."""
PROBE = "1 + 1 = 2, \\frac{a}{b}: the café's naïve £5 plan\n\n\tdef f(x): return x**2"
"""Text that tokenizers split differently."""


def make_teacher(config: TrainConfig, start: LoadedModel, learner: Learner) -> Teacher | None:
    """Return the teacher of ``[teacher]``, or None without that section."""
    settings = config.teacher
    if settings is None:
        return None
    scorer: Any = learner
    if settings.server is not None:
        scorer = ServedTeacher(settings.server, settings.model or "")
    elif settings.model is not None:
        with under("teacher.model"):
            frozen = load_policy(settings.model, dtype=config.model.dtype, device=resolve_device(config.run.device))
        scorer = ReferenceModel(frozen.model, valid_vocab=frozen.valid_vocab, model_config=config.model)
    encoder = PromptEncoder(start.tokenizer, UNLIMITED)

    def logprobs(samples: Sequence[TrainSample], problems: Sequence[Problem], temperature: float) -> list[FloatArray]:
        # Another model has other experts.
        asked = [replace(sample, experts=None) for sample in samples] if scorer is not learner else list(samples)
        if settings.prompt is not None:
            pairs = zip(asked, problems, strict=True)
            asked = [
                replace(one, prompt_tokens=encoder.encode(informed(problem, settings.prompt))) for one, problem in pairs
            ]
        return scorer.logprobs(asked, temperature)[0]

    return logprobs


def informed(problem: Problem, template: str) -> Problem:
    """Return the problem with the teacher's prompt: ``{prompt}`` and ``{reference}`` in ``template`` are replaced."""
    values = {"prompt": problem.prompt, "reference": problem.references[0] if problem.references else ""}
    # In one pass: a prompt may hold "{reference}" itself.
    return replace(problem, prompt=re.sub(r"\{(prompt|reference)\}", lambda found: values[found[1]], template))


def check_teacher(
    config: TrainConfig, policy: LoadedModel, problems: Sequence[Problem], longest: tuple[int, str], observed: int
) -> float:
    """Check before anything is loaded that the teacher fits the policy and the problems.

    Args:
        config: The recipe.
        policy: Initial model.
        problems: Training problems.
        longest: Tokens of the longest prompt among them, and the problem's id.
        observed: Most tokens that an environment's observations add to a response.

    Returns:
        Bytes of the teacher's weights in this process.

    Raises:
        RecipeError: Another tokenizer or vocabulary, a context that is too small, a problem without reference answer, a
            server that returns no log-probs, a correction that reads one advantage per response, or experts that were
            recorded for another prompt.
    """
    settings = config.teacher
    if settings is None:
        return 0.0
    if Objective(LearnerSettings.of(config)).correction.batch_mask is not None:
        raise RecipeError(
            f"{config.algorithm.correction!r} reads one advantage per response, and a teacher gives one per token; set "
            "it to tis or mis, or leave [teacher] out",
            key="algorithm.correction",
        )
    if config.model.router_replay and settings.model is None and settings.server is None:
        raise RecipeError(
            "the policy is its own teacher, and the experts of a response were recorded after the policy's prompt, not "
            "after teacher.prompt; set it to false, or name a teacher.model",
            key="model.router_replay",
        )
    if settings.prompt is not None and "{reference}" in settings.prompt:
        without = next((problem for problem in problems if not problem.references), None)
        if without is not None:
            raise RecipeError(
                f"it shows the reference answer, and problem {without.id!r} has none; leave {{reference}} out",
                key="teacher.prompt",
            )
    context, held = policy.max_context, 0.0
    if settings.server is not None:
        try:
            ServedTeacher(settings.server, settings.model or "").check(policy.tokenizer)
        except (ValueError, ServerError) as error:
            raise RecipeError(str(error), key="teacher.server") from error
    elif settings.model is not None:
        with under("teacher.model"):
            teacher = described_model(settings.model)
        _check_vocabulary(policy, teacher)
        context = teacher.max_context
        width = FLOAT32 if config.model.dtype == "float32" else BF16
        held = float(width * sum(parameter.numel() for parameter in teacher.model.parameters()))
    # Only the server knows its context. It refuses what is too long.
    if settings.server is None:
        _check_context(config, settings, policy, problems, longest, context - observed)
    return held


def _check_vocabulary(policy: LoadedModel, teacher: LoadedModel) -> None:
    ours, theirs = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours != theirs:
        other = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        raise RecipeError(
            f"{teacher.folder} has another tokenizer than {policy.folder}: {len(other)} tokens differ, such as "
            f"{other[0]!r}. Distillation compares the two models token by token: take a teacher of the same family",
            key="teacher.model",
        )
    if teacher.valid_vocab < policy.valid_vocab:
        raise RecipeError(
            f"{teacher.folder} has log-probs for {teacher.valid_vocab} tokens, {policy.folder} for "
            f"{policy.valid_vocab}; take a teacher of the same family",
            key="teacher.model",
        )


def _check_context(
    config: TrainConfig,
    settings: TeacherConfig,
    policy: LoadedModel,
    problems: Sequence[Problem],
    longest: tuple[int, str],
    context: int,
) -> None:
    template = settings.prompt
    if template is not None:
        encoder = PromptEncoder(policy.tokenizer, UNLIMITED)
        longest = max((encoder.length(informed(problem, template)), problem.id) for problem in problems)
    most = max(stage.max_tokens for stage in config.stages)
    if longest[0] + most > context:
        key = "teacher.model" if template is None else "teacher.prompt"
        raise RecipeError(
            f"the teacher's prompt of problem {longest[1]!r} has {longest[0]} tokens; with a response of {most} they "
            f"exceed its context of {context} tokens. Take a shorter prompt or a teacher with a larger context",
            key=key,
        )


class ServedTeacher:
    """A model behind vLLM's OpenAI-compatible server, which returns the log-probs of a prompt.

    Args:
        url: Address of the server, as ``http://localhost:8000/v1``.
        model: Name of the served model. Empty: the only one.
    """

    def __init__(self, url: str, model: str) -> None:
        self._settings = ServerSettings(base_url=url, model=model)
        self._model = model  # asked for once where it is not named

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], None]:
        """Return the log-probs of every response token at temperature 1, ``[T]`` per sample.

        Raises:
            ServerError: The server does not answer, or not with log-probs.
        """
        assert temperature == 1.0, "a server's log-probs of a prompt are those of temperature 1"
        prompts = [[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()] for sample in samples]
        found = asyncio.run(self._scored(prompts))
        return [
            frozen_floats(np.array([p for _, p in one[-len(s.tokens) :]], dtype=np.float32))
            for one, s in zip(found, samples, strict=True)
        ], None

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask for the log-probs of a text.

        Raises:
            ServerError: The server does not answer, or not with log-probs.
            ValueError: It splits the text into other tokens than ``tokenizer``.
        """
        found = [token for token, _ in asyncio.run(self._scored([PROBE], attempts=3))[0]]
        expected = cast("list[int]", tokenizer(PROBE)["input_ids"])[1:]  # the first token has no log-prob
        if found != expected:
            raise ValueError(
                f"{self._settings.shown('')} serves a model with another tokenizer: a test text has the tokens "
                f"{found[:8]} there and {expected[:8]} here. Serve a teacher of the same family"
            )

    async def _scored(
        self, prompts: Sequence[list[int] | str], *, attempts: int | None = None
    ) -> list[list[tuple[int, float]]]:
        """Return each prompt's tokens from the second one on, with their log-probs."""
        transport, slots = Transport(self._settings, ServerUsage()), asyncio.Semaphore(self._settings.concurrency)
        try:
            if not self._model:
                served = (await transport.send("GET", "/models", attempts=attempts)).get("data") or [{}]
                self._model = str(served[0].get("id", ""))

            async def ask(prompt: list[int] | str) -> list[tuple[int, float]]:
                # vLLM returns the log-probs of a prompt only together with at least one new token.
                body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
                async with slots:
                    answer = await transport.send("POST", "/completions", body, attempts=attempts)
                try:
                    stated: list[dict[str, Any]] = answer["choices"][0]["prompt_logprobs"][1:]
                    found = [next(iter(one.items())) for one in stated]
                    scored = [(int(token), float(entry["logprob"])) for token, entry in found]
                except (KeyError, IndexError, TypeError, ValueError, StopIteration, AttributeError):
                    raise ServerError(
                        f"{self._settings.shown('/completions')}: the answer holds no log-probs of the prompt; serve "
                        "the teacher with vLLM",
                        retryable=False,
                    ) from None
                for token, value in scored:
                    if not is_logprob(value):
                        place = self._settings.shown("/completions")
                        raise ServerError(f"{place}: the log-prob of token {token} is {value}", retryable=False)
                return scored

            return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))
        finally:
            await transport.close()
