"""Conversion of text to tokens and back, the same in training, evaluation and SFT."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple, cast

from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase

from magicrl.records import Problem, TokenArray, frozen_tokens
from magicrl.registry import resolve

_log = logging.getLogger(__name__)

# Placeholder for a text, to find what a chat template puts around it.
_MARK = "magicrlmark"

TEMPLATE_DAY = datetime(2024, 7, 26)
"""Day that chat templates show as today's, the default of Llama 3.1's own. With the real one, prompts would change at
midnight: within a run, and between a run and its resumption, repetition or evaluation."""


class _Answers(NamedTuple):
    """Rendering of an environment by a chat template.

    Attributes:
        tools: Tools of the environment.
        role: Role of its observations.
        before: Text of the template from the end of a turn to an observation.
        after: Text from there to the next turn.
    """

    tools: list[Any] | None
    role: str
    before: str
    after: str


class PromptEncoder:
    """Encoder of prompts, responses and observations for one tokenizer.

    With a chat template it encodes the problem's messages (usually one user message) and the template's generation
    prompt. Without one it encodes the text, after the begin-of-text token if the tokenizer adds one, and accepts no
    earlier turns. The text of a message, a response or an observation is always plain text: the name of a control token
    in it (``<|im_end|>``) is spelled out and cannot end a turn.

    Attributes:
        end_token: Last token of a taught response: the chat template's end of turn, else ``eos_token``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        """Prepare the encoder. Raise ``ValueError`` if there is no end token, or the chat template does not work."""
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        # Names that a message may contain as text, and that the tokenizer would read as control tokens.
        self._special = _control_names(tokenizer)
        turn = end_of_turn_token(tokenizer)
        end = turn if turn is not None else cast("int | None", tokenizer.eos_token_id)
        if end is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has no end token; set eos_token in its tokenizer_config.json"
            )
        self.end_token = end
        self._around = _chat_frame(tokenizer)
        if _shows_day(tokenizer):
            _warn_of_day(tokenizer.name_or_path)
        self._symbols = _whole_words(tokenizer)
        self._classes: dict[str, Any] = {}
        self._environments: dict[tuple[str, str], _Answers] = {}
        # A tokenizer may also append an end token to every text, which a prompt must not have.
        automatic = cast("list[int]", tokenizer("")["input_ids"])
        self._begin = [token for token in automatic[:1] if token == tokenizer.bos_token_id and token != end]

    def encode(self, problem: Problem) -> TokenArray:
        """Return the prompt as the model reads it, ``[P]``.

        Raises:
            ValueError: The prompt is longer than ``max_prompt_tokens``, empty, has a symbol that is not in the
                vocabulary, or has earlier turns without a chat template. The message names the problem.
        """
        if problem.context and self._around is None:
            roles = ", ".join(message.role for message in problem.messages)
            raise ValueError(
                f"problem {problem.id!r}: its prompt is a conversation ({roles}), and the model has no chat template "
                "to render it; take a chat model, put chat_template.jinja into its folder, or name a column of plain "
                "text as fields.prompt"
            )
        tokens = self._prompt_tokens(problem)
        self._check_known(tokens, " ".join(m.content for m in problem.messages), f"problem {problem.id!r}")
        if not tokens:
            raise ValueError(f"problem {problem.id!r} has an empty prompt")
        if len(tokens) > self._max_prompt_tokens:
            raise ValueError(
                f"problem {problem.id!r}: its prompt has {len(tokens)} tokens, more than the "
                f"{self._max_prompt_tokens} that the model's context or max_prompt_tokens allows; shorten or remove it"
            )
        return frozen_tokens(tokens)

    def fits(self, problem: Problem) -> bool:
        """Return whether the encoded prompt has at most ``max_prompt_tokens``."""
        return self.length(problem) <= self._max_prompt_tokens

    def length(self, problem: Problem) -> int:
        """Return the number of tokens of the encoded prompt, also above the limit."""
        return len(self._prompt_tokens(problem))

    def encode_response(self, text: str) -> TokenArray:
        """Return a whole response as the model should have sampled it, ``[T]``: the text, then the end token."""
        tokens = self._plain(text)
        self._check_known(tokens, text, "response")
        return frozen_tokens([*tokens, self.end_token])

    def observation(self, problem: Problem, text: str, max_tokens: int | None = None) -> TokenArray:
        """Return an observation of ``problem``'s environment as it follows the end token of a turn, ``[O]``.

        With a chat template it includes everything between that token and the model's next turn. The message has the
        role of a tool if the environment has ``tools`` and the template supports such messages, else of the user.
        Without a template it is the text only. A text with more than ``max_tokens`` tokens is truncated to its
        beginning.

        Raises:
            ValueError: The vocabulary lacks a symbol of the text, or ``max_tokens`` is less than the template's own
                tokens.
        """
        if self._around is None:
            tokens = self._plain(text)[:max_tokens]
        else:
            tokens = self._answer(self._shown(problem), text, max_tokens)
        self._check_known(tokens, text, f"problem {problem.id!r}, an observation of its environment")
        return frozen_tokens(tokens)

    def decode(self, tokens: TokenArray | Sequence[int]) -> str:
        """Return the text of response tokens, without control tokens."""
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _prompt_tokens(self, problem: Problem) -> list[int]:
        if self._around is None:
            return [*self._begin, *self._plain(problem.prompt)] if problem.prompt.strip() else []
        texts = [message.content for message in problem.messages]
        tools = None if problem.environment is None else self._shown(problem).tools
        # No message names a control token, so the rendered text is tokenized as a whole, as the template intends.
        if not any(token in text for text in texts for token in self._special):
            turns = [(message.role, message.content) for message in problem.messages]
            return self._with_controls(render(self._tokenizer, turns, generation_prompt=True, tools=tools))
        # A message names one: the template and the texts are tokenized separately, so that the message ends no turn.
        roles = tuple(message.role for message in problem.messages)
        plain = roles == ("user",) and tools is None
        first, *after = self._around if plain else _frame(self._tokenizer, roles, tools)
        tokens = self._with_controls(first)
        for text, piece in zip(texts, after, strict=True):
            tokens += [*self._plain(text), *self._with_controls(piece)]
        return tokens

    def _answer(self, shown: _Answers, text: str, max_tokens: int | None) -> list[int]:
        """Return the tokens of an observation as the chat template renders it."""
        if not any(token in text for token in self._special):
            turns = [("user", "?"), ("assistant", _MARK), (shown.role, text)]
            tokens = self._behind_end(render(self._tokenizer, turns, generation_prompt=True).partition(_MARK)[2])
            if max_tokens is None or len(tokens) <= max_tokens:
                return tokens
        before, after = self._behind_end(shown.before), self._with_controls(shown.after)
        room = None if max_tokens is None else max_tokens - len(before) - len(after)
        if room is not None and room < 0:
            raise ValueError(
                f"an observation of at most {max_tokens} tokens has no room for the {len(before) + len(after)} that "
                "the chat template puts around it; raise the limit"
            )
        return [*before, *self._plain(text)[:room], *after]

    def _behind_end(self, text: str) -> list[int]:
        """Return the tokens of a rendered template after the end token of a turn, which the model has sampled."""
        # Tokenized with it, because a tokenizer may treat text after a control token differently.
        tokens = self._with_controls(text)
        return tokens[1:] if tokens[:1] == [self.end_token] else tokens

    def _shown(self, problem: Problem) -> _Answers:
        """Return how the chat template renders the problem's environment."""
        name = problem.environment
        assert name is not None, f"problem {problem.id!r} has no environment"
        if name not in self._classes:
            self._classes[name] = resolve("environment", name)
        found = self._classes[name]
        own = getattr(found, "tools_of", None)
        tools: list[Any] = list(own(problem) if own is not None else getattr(found, "tools", None) or ())
        key = (name, json.dumps(tools, default=str))
        if key not in self._environments:
            self._environments[key] = _answers(self._tokenizer, name, tools or None)
        return self._environments[key]

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with names of control tokens spelled out as ordinary characters."""
        if self._symbols is not None:
            unknown = cast(int, self._tokenizer.unk_token_id)
            return [self._symbols.get(word, unknown) for word in text.split()]
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return cast("list[int]", encoded["input_ids"])

    def _with_controls(self, text: str) -> list[int]:
        """Return the tokens of a rendered template including its control tokens. It names a begin-of-text token
        itself.
        """
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_known(self, tokens: Sequence[int], text: str, what: str) -> None:
        unknown = cast("int | None", self._tokenizer.unk_token_id)
        if (
            # There is no such token, the prompt has none, or a text spells its name.
            unknown is None
            or unknown not in tokens
            or (self._symbols is None and str(self._tokenizer.unk_token) in text)
        ):
            return
        vocabulary = self._tokenizer.get_vocab() if self._symbols is None else self._symbols
        strange = [word for word in text.split() if vocabulary.get(word, unknown) == unknown]
        named = f"{strange[:5]!r}" if strange else "a part of its chat template"
        raise ValueError(
            f"{what}: the tokenizer does not know {named}; use a model made for these problems, or correct the problem"
        )


def prompt_format(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how prompts are made, for the records of runs and evaluations."""
    if not tokenizer.chat_template:
        return "plain text"
    return "chat template" + (f", dated {TEMPLATE_DAY:%Y-%m-%d}" if _shows_day(tokenizer) else "")


def _shows_day(tokenizer: PreTrainedTokenizerBase) -> bool:
    return "strftime_now" in str(tokenizer.chat_template)


@cache
def _warn_of_day(model: str) -> None:
    text = "the chat template of %s shows the date: it is always %s, so that prompts are the same every day"
    _log.warning(text, model, f"{TEMPLATE_DAY:%Y-%m-%d}")


def end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the control token that the chat template puts after an assistant's message. None without one.

    A chat model ends a response with it. It can differ from ``eos_token``, as in base models with a chat template.

    Raises:
        ValueError: The template fails, omits the user's message, or ends a turn with a control token that the tokenizer
            does not have.
    """
    if _chat_frame(tokenizer) is None:
        return None
    rendered = render(tokenizer, [("user", "?"), ("assistant", _MARK)])
    after = rendered.rpartition(_MARK)[2]
    tokens = cast("list[int]", tokenizer(after, add_special_tokens=False)["input_ids"])
    name = str(tokenizer.convert_ids_to_tokens(tokens[0])) if tokens else ""
    # The unknown token is a control token, too, but the text does not begin with its name.
    if name in _control_names(tokenizer) and after.lstrip().startswith(name):
        return tokens[0]
    written = re.match(r"\s*(<\|[^|<>\s]{1,40}\|>)", after)
    if written is not None and written[1] not in tokenizer.get_vocab():
        raise ValueError(
            f"the chat template ends a turn with {written[1]}, which is no token of this tokenizer, so no response "
            "could end; use the model's own tokenizer and chat template, or remove chat_template"
        )
    return None


def _answers(tokenizer: PreTrainedTokenizerBase, environment: str, tools: list[Any] | None) -> _Answers:
    """Return how the chat template renders this environment. Warn if it omits the environment's tools."""
    asked = [("user", "?")]
    if tools is not None and render(tokenizer, asked, tools=tools) == render(tokenizer, asked):
        text = "the chat template shows no tools: the model learns of those of environment %r from its prompts alone"
        _log.warning(text, environment)
    if tools is not None:
        try:
            return _Answers(tools, "tool", *_frame(tokenizer, ("user", "assistant", "tool"))[2:])
        except ValueError:
            pass  # the template has no messages of tools
    return _Answers(tools, "user", *_frame(tokenizer, ("user", "assistant", "user"))[2:])


def _control_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the names of control tokens, including those without an entry in the tokenizer's settings."""
    added = cast("dict[int, Any]", tokenizer.added_tokens_decoder).values()
    return tuple({*map(str, tokenizer.all_special_tokens), *(str(token) for token in added if token.special)})


def _whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """Return the vocabulary of a tokenizer whose tokens are whole words, None for any other.

    Looking up words is ten times faster than calling such a tokenizer. This matters for the tiny models: their SFT
    encodes 100,000 demonstrations per minute. Control tokens are excluded, because no text can name one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model, split = getattr(backend, "model", None), getattr(backend, "pre_tokenizer", None)
    if not isinstance(model, WordLevel) or not isinstance(split, WhitespaceSplit) or tokenizer.unk_token_id is None:
        return None
    # A normaliser would change words before the lookup.
    if cast(Any, backend).normalizer is not None:
        return None
    control = set(tokenizer.all_special_ids)
    return {word: token for word, token in tokenizer.get_vocab().items() if token not in control}


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
    """Return the template's text before and after a user's message, None without a template."""
    return _frame(tokenizer, ("user",)) if tokenizer.chat_template else None


def _frame(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], tools: list[Any] | None = None) -> tuple[str, ...]:
    """Return the template's text before, between and after messages of these roles, including the generation prompt."""
    # Numbered, so that each message is found in its own place. The x separates 1 from 10.
    marks = [f"{_MARK}{number}x" for number in range(len(roles))]
    rest = render(tokenizer, list(zip(roles, marks, strict=True)), generation_prompt=True, tools=tools)
    pieces: list[str] = []
    for role, mark in zip(roles, marks, strict=True):
        before, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(
                f"the tokenizer's chat template leaves the {role}'s message out, so no prompt would reach the model; "
                "correct chat_template in tokenizer_config.json or chat_template.jinja, or remove it"
            )
        pieces.append(before)
    return (*pieces, rest)


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[tuple[str, str]],
    *,
    generation_prompt: bool = False,
    tools: list[Any] | None = None,
) -> str:
    """Return the text of turns (role, content) by the tokenizer's chat template.

    Raises:
        ValueError: The template fails on them.
    """
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            strftime_now=TEMPLATE_DAY.strftime,  # instead of the function of this name that transformers passes
        )
    except Exception as error:  # a template is code of the model, and may be no text at all
        raise ValueError(
            f"the tokenizer's chat template fails on a conversation of {' and '.join(role for role, _ in turns)} "
            f"({type(error).__name__}: {error}); correct chat_template in tokenizer_config.json or "
            "chat_template.jinja, or remove it"
        ) from error
    return cast(str, text)
