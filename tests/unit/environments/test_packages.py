"""Tool calls in a turn, optional packages and waiting for coroutines."""

from __future__ import annotations

import asyncio

import pytest

from magicrl.environments.packages import package, read_turn, wait

PRICE = ("price", {"item": "pear"})


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(ImportError, match=r"no_such_package.*pip install 'magicrl\[verifiers\]'"):
        package("no_such_package.v1", "verifiers")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>',
        '<tool_call>\n{"name": "price", "arguments": "{\\"item\\": \\"pear\\"}"}\n</tool_call>',
        '<tool_call>{"name": "price", "arguments": {"item": "pear"}}',
        '<tool_call>[{"name": "price", "arguments": {"item": "pear"}}]</tool_call>',
        ' {"name": "price", "parameters": {"item": "pear"}} ',
    ],
)
def test_a_call_is_read_in_the_forms_that_chat_templates_ask_for(text: str) -> None:
    assert read_turn(text) == (None, "", [PRICE])


def test_reasoning_and_text_are_separate_from_calls() -> None:
    call = '<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>'
    found = read_turn(f"<think>{call} or not</think>I ask.{call}{call}")
    assert found == (f"{call} or not", "I ask.", [PRICE, PRICE])


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "",
        "<tool_call>price(pear)</tool_call>",
        '<tool_call>{"name": "price"}</tool_call>',
        '{"name": 3, "arguments": {}}',
        '{"name": "price", "arguments": "{"}',
        "[1, 2]",
        "[]",
        "<tool_call>[]</tool_call>",
        "[" * 100_000,
        "<tool_call>" * 10_000,
        # one of two calls is unreadable: none is guessed
        '<tool_call>{"name": "price", "arguments": {}}</tool_call> <tool_call>price(pear)</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_turn(text) == (None, text, [])


def test_a_coroutine_is_waited_for_no_longer_than_asked() -> None:
    assert wait(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(TimeoutError):
        wait(asyncio.sleep(5), 0.01)
