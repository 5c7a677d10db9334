"""Text to tokens and back, the same way in training, evaluation and supervised training."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase

from magicrl.records import Problem, TokenArray, frozen_tokens
from magicrl.registry import resolve

_log = logging.getLogger(__name__)

# Stands for a text while a chat template is rendered, to see what the template puts around it.
_MARK = "magicrlmark"


class _Answers(NamedTuple):
    """How a chat template shows an environment: its tools, the role of its observations, and what the template puts
    from the end of a turn to an observation's text and from there to the next turn."""

    tools: list[Any] | None
    role: str
    before: str
    after: str


class PromptEncoder:
    """Encodes prompts, responses and observations for one tokenizer.

    A tokenizer with a chat template gets the problem's messages (mostly one user message) followed by the template's
    generation prompt; one without gets the text alone, after the begin-of-text token where the tokenizer puts one, and
    no turns before it. The text of a message, a response or an observation is always plain text: the name of a control
    token inside it (``<|im_end|>``) is spelled out and cannot end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        """``ValueError`` if the tokenizer has no end token, or its chat template does not work."""
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        # names that a message could hold as text, and the tokenizer would take for control tokens
        self._special = _control_names(tokenizer)
        turn = end_of_turn_token(tokenizer)
        end = turn if turn is not None else cast("int | None", tokenizer.eos_token_id)
        if end is None:
            raise ValueError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self._end_token = end
        self._around = _chat_frame(tokenizer)
        self._symbols = _whole_words(tokenizer)
        self._classes: dict[str, Any] = {}
        self._environments: dict[tuple[str, str], _Answers] = {}
        # A tokenizer may also append an end token to every text; a prompt must not have that.
        automatic = cast("list[int]", tokenizer("")["input_ids"])
        self._begin = [token for token in automatic[:1] if token == tokenizer.bos_token_id and token != end]

    @property
    def end_token(self) -> int:
        """The token that a taught response ends with: the chat template's end of turn, else ``eos_token``."""
        return self._end_token

    def encode(self, problem: Problem) -> TokenArray:
        """The prompt as the model sees it, ``[P]``.

        ``ValueError``, which names the problem, if it is longer than ``max_prompt_tokens``, empty, has a symbol that
        the vocabulary lacks, or turns before it where there is no chat template.
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
                f"problem {problem.id!r}: its prompt has {len(tokens)} tokens, more than max_prompt_tokens = "
                f"{self._max_prompt_tokens}; raise the limit, shorten it, or set data.overlong_prompts = 'drop'"
            )
        return frozen_tokens(tokens)

    def fits(self, problem: Problem) -> bool:
        """Whether the encoded prompt is within ``max_prompt_tokens``."""
        return self.length(problem) <= self._max_prompt_tokens

    def length(self, problem: Problem) -> int:
        """Tokens of the encoded prompt, whether or not that is too many."""
        return len(self._prompt_tokens(problem))

    def encode_response(self, text: str) -> TokenArray:
        """A whole response as the model should have produced it, ``[T]``: the text, then the end token."""
        tokens = self._plain(text)
        self._check_known(tokens, text, "response")
        return frozen_tokens([*tokens, self._end_token])

    def observation(self, problem: Problem, text: str, max_tokens: int | None = None) -> TokenArray:
        """What ``problem``'s environment says, as it goes on behind the end token of a turn, ``[O]``.

        With a chat template all that the template puts between that token and the model's next turn: the message of a
        tool, if the environment has ``tools`` and the template knows such messages, else of the user. Without one the
        text alone. Of a text that would give more than ``max_tokens`` the beginning is kept.

        ``ValueError`` if the vocabulary lacks a symbol of it, or ``max_tokens`` is less than the template's own tokens.
        """
        if self._around is None:
            tokens = self._plain(text)[:max_tokens]
        else:
            tokens = self._answer(self._shown(problem), text, max_tokens)
        self._check_known(tokens, text, f"problem {problem.id!r}, an observation of its environment")
        return frozen_tokens(tokens)

    def decode(self, tokens: TokenArray | Sequence[int]) -> str:
        """The text of response tokens, control tokens left out."""
        ids = [int(token) for token in tokens]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _prompt_tokens(self, problem: Problem) -> list[int]:
        if self._around is None:
            return [*self._begin, *self._plain(problem.prompt)] if problem.prompt.strip() else []
        texts = [message.content for message in problem.messages]
        tools = None if problem.environment is None else self._shown(problem).tools
        # no message names a control token: the rendered text is tokenized whole, as the template means it
        if not any(token in text for text in texts for token in self._special):
            turns = [(message.role, message.content) for message in problem.messages]
            return self._with_controls(_render(self._tokenizer, turns, generation_prompt=True, tools=tools))
        # a message names one: what the template puts around the messages and their texts apart, so that it ends no turn
        roles = tuple(message.role for message in problem.messages)
        plain = roles == ("user",) and tools is None
        first, *after = self._around if plain else _frame(self._tokenizer, roles, tools)
        tokens = self._with_controls(first)
        for text, piece in zip(texts, after, strict=True):
            tokens += [*self._plain(text), *self._with_controls(piece)]
        return tokens

    def _answer(self, shown: _Answers, text: str, max_tokens: int | None) -> list[int]:
        """Tokens of an observation as the chat template shows it."""
        if not any(token in text for token in self._special):
            turns = [("user", "?"), ("assistant", _MARK), (shown.role, text)]
            tokens = self._behind_end(_render(self._tokenizer, turns, generation_prompt=True).partition(_MARK)[2])
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
        """Tokens of a rendered template from a turn's end on, without the end token, which the model has written."""
        # tokenized with it: a tokenizer may treat what follows a control token in a way of its own
        tokens = self._with_controls(text)
        return tokens[1:] if tokens[:1] == [self._end_token] else tokens

    def _shown(self, problem: Problem) -> _Answers:
        """How the chat template shows the problem's environment."""
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
        """Tokens of ``text``, names of control tokens spelled out as ordinary characters."""
        if self._symbols is not None:
            unknown = cast(int, self._tokenizer.unk_token_id)
            return [self._symbols.get(word, unknown) for word in text.split()]
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return cast("list[int]", encoded["input_ids"])

    def _with_controls(self, text: str) -> list[int]:
        """Tokens of a rendered template, whose control tokens are meant; it names a begin-of-text token itself."""
        return cast("list[int]", self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_known(self, tokens: Sequence[int], text: str, what: str) -> None:
        unknown = cast("int | None", self._tokenizer.unk_token_id)
        if (
            # there is no such token, the prompt has none, or a text spells its name
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


def end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The control token that the chat template puts after an assistant's message; None without one.

    It is what a chat model ends a response with, and need not be ``eos_token``: base models that ship a template
    have another ``eos_token``. ``ValueError`` if the template fails, or leaves the user's message out.
    """
    if _chat_frame(tokenizer) is None:
        return None
    rendered = _render(tokenizer, [("user", "?"), ("assistant", _MARK)])
    after = rendered.rpartition(_MARK)[2]
    tokens = cast("list[int]", tokenizer(after, add_special_tokens=False)["input_ids"])
    return tokens[0] if tokens and tokenizer.convert_ids_to_tokens(tokens[0]) in _control_names(tokenizer) else None


def _answers(tokenizer: PreTrainedTokenizerBase, environment: str, tools: list[Any] | None) -> _Answers:
    """How the chat template shows this environment; warns where it leaves the environment's tools out."""
    asked = [("user", "?")]
    if tools is not None and _render(tokenizer, asked, tools=tools) == _render(tokenizer, asked):
        text = "the chat template shows no tools: the model learns of those of environment %r from its prompts alone"
        _log.warning(text, environment)
    if tools is not None:
        try:
            return _Answers(tools, "tool", *_frame(tokenizer, ("user", "assistant", "tool"))[2:])
        except ValueError:
            pass  # it has no messages of tools
    return _Answers(tools, "user", *_frame(tokenizer, ("user", "assistant", "user"))[2:])


def _control_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Names of control tokens, those too that have no part of their own in the tokenizer's settings."""
    added = cast("dict[int, Any]", tokenizer.added_tokens_decoder).values()
    return tuple({*map(str, tokenizer.all_special_tokens), *(str(token) for token in added if token.special)})


def _whole_words(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """The vocabulary of a tokenizer whose tokens are whole words, None for any other.

    Looking words up is ten times faster than calling such a tokenizer, which matters for the tiny models: a
    supervised start encodes 100,000 demonstrations in its minute. Control tokens are left out: no text can name one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model, split = getattr(backend, "model", None), getattr(backend, "pre_tokenizer", None)
    if not isinstance(model, WordLevel) or not isinstance(split, WhitespaceSplit) or tokenizer.unk_token_id is None:
        return None
    # a normaliser would change words before they are looked up
    if cast(Any, backend).normalizer is not None:
        return None
    control = set(tokenizer.all_special_ids)
    return {word: token for word, token in tokenizer.get_vocab().items() if token not in control}


def _chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
    """What the template puts before and after a user's message; None without a template."""
    return _frame(tokenizer, ("user",)) if tokenizer.chat_template else None


def _frame(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], tools: list[Any] | None = None) -> tuple[str, ...]:
    """What the template puts before, between and after messages of these roles, the generation prompt included."""
    # numbered, so that each message is found in its own place; x, since 1 begins 10
    marks = [f"{_MARK}{number}x" for number in range(len(roles))]
    rest = _render(tokenizer, list(zip(roles, marks, strict=True)), generation_prompt=True, tools=tools)
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


def _render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[tuple[str, str]],
    *,
    generation_prompt: bool = False,
    tools: list[Any] | None = None,
) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        raise ValueError(
            f"the tokenizer's chat template fails on a conversation of {' and '.join(role for role, _ in turns)} "
            f"({type(error).__name__}: {error}); correct chat_template in tokenizer_config.json or "
            "chat_template.jinja, or remove it"
        ) from error
    return cast(str, text)
