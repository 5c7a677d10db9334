"""Every bad input that ``docs/errors.md`` lists. One table drives the tests and the page."""

from __future__ import annotations

from error_cases_of_runs import MODELS, RESUMING, TRAINING, case, nothing
from error_making import (
    content,
    forget_a_word,
    problems,
    recipe,
    settings,
    several,
    write_problems,
)

RECIPES = (
    case(
        "mistyped-key",
        "A mistyped key",
        recipe("memory_limit_mb", "memory_limit_mbb"),
        2,
        "recipe.toml, line 17",
        "rollout.memory_limit_mbb",
        "did you mean 'memory_limit_mb'",
    ),
    case(
        "unknown-key",
        "A key that is like none",
        recipe('name = "toy"', 'name = "toy"\nzzz = 1'),
        2,
        "recipe.toml, line 3",
        "run.zzz",
        "known keys: device",
    ),
    case(
        "wrong-type",
        "A value of the wrong type",
        recipe("group_size = 4", 'group_size = "four"'),
        2,
        "recipe.toml, line 25",
        "stages.0.group_size",
        "integer",
        "'four'",
    ),
    case(
        "set-unknown",
        "An unknown key in --set",
        settings("rollout.temprature=1"),
        2,
        "--set rollout.temprature=1",
        "did you mean 'temperature'",
    ),
    case(
        "set-type",
        "A wrong value in --set",
        settings("stages.0.max_tokens=many"),
        2,
        "--set stages.0.max_tokens=many",
        "integer",
    ),
    case(
        "no-recipe",
        "A recipe that is not there",
        nothing,
        2,
        "did you mean recipe.toml?",
        arguments=("train", "recip.toml"),
    ),
    case(
        "toml",
        "A recipe that is not TOML",
        recipe("max_rows = 32", "max_rows ="),
        2,
        "recipe.toml, line 16",
        "'max_rows ='",
        "every key needs a value",
    ),
    case(
        "missing-table", "A missing table", recipe('[start]\nmodel = "start"', ""), 2, "recipe.toml", "start is missing"
    ),
    case(
        "family",
        "An unknown task family",
        recipe('path = "problems.jsonl"', 'family = "runing_sum"\ncount = 9'),
        2,
        "recipe.toml, line 12: data.train.0.family",
        "did you mean 'running_sum'",
    ),
    case(
        "device",
        'No CUDA device with device = "cuda"',
        settings("run.device=cuda"),
        2,
        "run.device",
        "use 'cpu' or 'auto'",
    ),
    case(
        "context",
        "T over the model's context",
        recipe("max_tokens = 8", "max_tokens = 60"),
        2,
        "recipe.toml, line 23: stages.0.max_tokens",
        "64 tokens",
        "lower it to at most 53",
    ),
)

DATA = (
    case(
        "no-file",
        "A data file that is not there",
        recipe("problems.jsonl", "problem.jsonl"),
        2,
        "recipe.toml, line 12: data.train.0.path",
        "problem.jsonl: no such file",
        "there are: problems.jsonl",
    ),
    case(
        "a-folder",
        "A folder in place of a file",
        recipe("problems.jsonl", "start"),
        2,
        "data.train.0.path",
        "is a folder",
        "name one data file",
    ),
    case(
        "empty-file", "An empty data file", content("problems.jsonl", ""), 1, "problems.jsonl", "empty", "give a file"
    ),
    case(
        "broken-line",
        "A broken line",
        content("problems.jsonl", '{"problem": "L 1 :", "answer": "1"}\n{"problem":\n'),
        1,
        "problems.jsonl, line 2",
        "column",
        "one whole object",
    ),
    case(
        "not-utf8",
        "A file that is not UTF-8",
        content("problems.jsonl", b'{"problem": "L 1 :", "answer": "1"}\n{"problem": "\xe9"}\n'),
        1,
        "problems.jsonl, line 2",
        "convert the file to UTF-8",
    ),
    case(
        "missing-field",
        "A missing field",
        problems({"problem": "L 1 :", "anwser": "1"}),
        1,
        "problems.jsonl, line 4",
        "no field 'answer'",
        "nearest is 'anwser'",
        "fields.answer",
    ),
    case(
        "field-type",
        "A field of the wrong type",
        problems({"problem": 5, "answer": "1"}),
        1,
        "problems.jsonl, line 4",
        "'problem' must be text",
        "in quotes",
    ),
    case(
        "double-id",
        "Two problems with one id",
        several(
            lambda: write_problems(
                [{"id": 7, "problem": "L 1 :", "answer": "1"}, {"id": 7, "problem": "L 2 :", "answer": "2"}]
            ),
            recipe('verifier = "exact"', 'verifier = "exact"\nfields = { id = "id" }'),
        ),
        1,
        "problems.jsonl, line 2",
        "problems.jsonl, line 1",
        "change one",
    ),
    case(
        "long-prompt",
        "A prompt over its limit",
        settings("data.max_prompt_tokens=10"),
        1,
        "problems.jsonl, line 1",
        "11 tokens",
        "max_prompt_tokens = 10",
        "3 of 3",
        "overlong_prompts = 'drop'",
    ),
    case(
        "unknown-word",
        "A text that the tokenizer does not know",
        forget_a_word,
        1,
        "problems.jsonl, line 4",
        "['9']",
        "correct the problem",
    ),
    case(
        "all-in-test",
        "A training set that is the test set",
        several(recipe("[rollout]", '[data.test.same]\npath = "problems.jsonl"\nverifier = "exact"\n\n[rollout]')),
        2,
        "data.train",
        "every one of its 3 problems",
        "give other problems",
    ),
)

SECTIONS = (
    ("Recipes and settings", RECIPES),
    ("Problems", DATA),
    ("Models", MODELS),
    ("Training and output", TRAINING),
    ("Resuming", RESUMING),
)
CASES = tuple(one for _, cases in SECTIONS for one in cases)
