"""Two values for every setting of a recipe that lead to different effects, and where the effect is visible.

Read by `tests/unit/config/test_every_setting.py`. A row names a setting as the schema does (``stages[].reuse``,
``data.test.*.path``), an observer of `setting_observers.py` (``see_NAME``), changes of the base recipe that the setting
needs in order to have an effect, two values, and the keys of the observer's dictionary that must differ. ``gives``
are the values there, where they are known exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from setting_files import ENVIRONMENT, PHASE, TRAIN


class _LeftOut:
    """Marker of a setting that the recipe leaves out."""

    def __repr__(self) -> str:
        return "left out"


LEFT_OUT: Any = _LeftOut()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting, and where its effect is visible."""

    setting: str  # name in the schema
    observer: str  # a method ``see_NAME`` of `setting_observers.Observers`
    values: tuple[Any, Any]
    sees: tuple[str, ...]  # keys of the observer's dictionary, all of which must differ
    base: Mapping[str, Any] = field(default_factory=dict[str, Any])  # further settings of both recipes
    gives: tuple[Any, Any] | None = None  # values under the first key
    recipe: str = "train"  # or ``sft``
    refuses: str = ""  # text in every rejection with an ``error``; default: the setting's name


def _row(setting: str, values: Sequence[Any], observer: str, *sees: str, **further: Any) -> Row:
    base, gives = further.pop("base", {}), further.pop("gives", None)
    assert not further, further
    one, other = values
    return Row(setting=setting, observer=observer, values=(one, other), sees=sees, base=base, gives=gives)


def _under(prefix: str, rows: Sequence[tuple[Any, ...]], *, recipe: str = "train") -> list[Row]:
    """Return rows of one table: (key, values, observer, keys, base, given values)."""
    found: list[Row] = []
    for key, values, observer, sees, *rest in rows:
        found.append(
            Row(
                setting=f"{prefix}.{key}",
                observer=observer,
                values=tuple(values),
                sees=(sees,) if isinstance(sees, str) else tuple(sees),
                base=rest[0] if rest else {},
                gives=rest[1] if len(rest) > 1 else None,
                refuses=rest[2] if len(rest) > 2 else "",
                recipe=recipe,
            )
        )
    return found


SHORT = {"evaluation.every": 0, "data.test": {}, "data.validation": []}
"""Settings without evaluations, for rows that look only at training."""
COMMAND = {**SHORT, "stages[].max_steps": 1}

RUN = _under(
    "run",
    [
        ("name", ("one", "two"), "command", "folders", COMMAND, (["runs/one"], ["runs/two"])),
        ("seed", (3, 4), "run", ("rollouts", "requests")),
        ("output", ("one", "two"), "command", "folders", COMMAND, (["one"], ["two"])),
        ("threads", (1, 2), "run", "run/threads", SHORT, (1, 2)),
        ("device", ("cpu", "cuda"), "checks", "error", {}, None, "CUDA"),
        ("expected_minutes", (3.0, 7.0), "minutes", "said"),
    ],
)
START = [
    _row("start.model", ("model", "other-model"), "run", "rollouts"),
    _row("start.sft", ("start-a.toml", "start-b.toml"), "start", "model/weights", base={"start.model": LEFT_OUT}),
]

BF16 = {"model.dtype": "bfloat16"}
LORA = {**SHORT, "model.lora": {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}}


SHARED = {
    "model": {"folder": "wide-model"},
    "phases": [
        {**{k: v for k, v in PHASE.items() if k not in ("family", "options")}, "data": {"path": "shared.jsonl"}}
    ],
}
"""A supervised phase that shows two prompts, each twice per batch."""


def model_rows(prefix: str, observer: str, recipe: str, short: Mapping[str, Any]) -> list[Row]:
    """Return rows of a ``ModelConfig`` for both kinds of recipes, which differ in the records of a step."""
    loss = "metrics/learner/loss" if recipe == "train" else "losses"
    small = {**short, f"{prefix}.share_prompts": False}
    shown = short if recipe == "train" else SHARED
    start, base = ("adapters", {}) if recipe == "train" else ("wide-adapters", {"model": {"folder": "wide-model"}})
    lora = {**short, f"{prefix}.lora": {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}}
    return _under(
        prefix,
        [
            ("dtype", ("float32", "bfloat16"), observer, ("model/dtype", loss), short),
            ("head_dtype", (LEFT_OUT, "float32"), observer, loss, {**short, f"{prefix}.dtype": "bfloat16"}),
            ("gradient_checkpointing", (False, True), observer, "layers", short),
            ("checkpoint_above_tokens", (8, 100_000), observer, "layers", short),
            ("micro_batch_tokens", (40, 400), observer, "passes", small),
            ("share_prompts", (False, True), observer, "passes", shown),
            ("head_chunk_tokens", (4, 1024), observer, "pieces", short),
            ("compile", (False, True), "compiled", "compiled"),
            ("lora.rank", (2, 3), observer, ("adapters", "model/weights"), lora),
            ("lora.alpha", (8.0, 2.0), observer, loss, lora),
            ("lora.target_modules", (["q_proj"], ["q_proj", "o_proj"]), observer, "adapters", lora),
            ("lora.start", (LEFT_OUT, start), observer, loss, {**lora, **base}),
        ],
        recipe=recipe,
    )


MODEL = [
    *model_rows("model", "run", "train", SHORT),
    *_under(
        "model",
        [
            (
                "entropy_clamp",
                (0.0, 0.5),
                "run",
                "model/weights",
                {**SHORT, "entropy.controller": "fixed", "entropy.alpha": 0.1},
            ),
            ("router_replay", (False, True), "checks", "error", {}, None, "router"),
            (
                "exact",
                (False, True),
                "run",
                "metrics/learner/sampler_gap_max",
                {**SHORT, "start.model": "one-head-model"},
            ),
        ],
    ),
]

FAMILY = {"family": "running_sum", "count": 3}
SUMS = {"run.seed": 3}


def source_rows(place: str, name: str) -> list[Row]:
    """Return rows of one set of problems. ``name`` is its key in the observer's dictionary."""
    file = {place: {"path": "source.jsonl"}}
    family = {place: {"family": "running_sum", "count": 3, "seed": 1, "split": "train"}}
    files = ("source.jsonl", "other-source.jsonl")
    leveled = {place: {"path": "source.jsonl", "fields": {"level": "grade"}}}
    return _under(
        place,
        [
            ("family", ("running_sum", "guess_number"), "problems", name, {place: {"count": 3}}),
            ("path", files, "problems", name, {place: {}}),
            ("hub", ("one/set", "two/set"), "problems", "hub", {place: {}}),
            ("source", ("read.py:one", "read.py:two"), "problems", name, {place: {}}),
            ("seed", (0, 1), "problems", name, family),
            ("count", (2, 3), "problems", name, file),
            ("levels", ([1], [2]), "problems", name, leveled),
            ("split", ("train", "validation"), "problems", name, family),
            ("options", ({}, {"level_shares": "2:1.0"}), "problems", name, family),
            ("label_noise", (0.0, 1.0), "problems", name, file),
            ("fields.prompt", (LEFT_OUT, "asked"), "problems", name, file),
            ("fields.answer", (LEFT_OUT, "grade"), "problems", name, file),
            ("fields.id", (LEFT_OUT, "name"), "problems", name, file),
            ("fields.level", (LEFT_OUT, "grade"), "problems", name, file),
            ("difficulty_of", (LEFT_OUT, "m"), "problems", name, file),
            ("template", (LEFT_OUT, "{prompt} then"), "problems", name, file),
            ("verifier", ("exact", "maths"), "problems", name, file),
            ("environment", (LEFT_OUT, ENVIRONMENT), "problems", name, file),
        ],
    )


OVERLONG = {
    "data.max_prompt_tokens": 5,
    "data.overlong_prompts": "drop",
    "data.train[].path": "mixed.jsonl",
    "data.test": {},
    "data.validation": [],
}
FILTER = {
    **SHORT,
    "data.difficulty_filter": {"samples": 3, "temperature": 1.0, "max_tokens": 8},
    "stages[].max_steps": 1,
}
TWO_STAGES = {**SHORT, "stages": [{**TRAIN["stages"][0], "max_steps": 1}] * 2}
DATA = [
    *source_rows("data.train[]", "train"),
    *source_rows("data.validation[]", "validation"),
    *source_rows("data.test.*", "held_out"),
    *_under(
        "data",
        [
            ("holdout", (1, 2), "problems", ("train", "holdout")),
            ("max_prompt_tokens", (6, 4), "problems", "dropped_overlong", OVERLONG),
            ("sampler", ("uniform", "short_first"), "run", "requests", SHORT),
            (
                "sampler_options",
                ({"hard_share": 0.0, "easy_share": 0.0}, {"hard_share": 1.0, "easy_share": 0.0}),
                "run",
                "requests",
                {**SHORT, "data.sampler": "difficulty"},
            ),
            ("overlong_prompts", ("error", "drop"), "problems", "error", OVERLONG),
            ("difficulty_filter.samples", (2, 4), "run", ("requests", "difficulty"), FILTER),
            ("difficulty_filter.temperature", (1.0, 0.5), "run", ("requests", "difficulty"), FILTER),
            ("difficulty_filter.max_tokens", (8, 4), "run", ("requests", "difficulty"), FILTER),
            ("online_filter", (True, False), "run", "events/filter", TWO_STAGES),
        ],
    ),
]

VLLM = {
    "rollout.engine": "vllm",
    "entropy.estimator": "sampled",
    "model.dtype": "bfloat16",
}
LAG = {**SHORT, "rollout.weight_lag": 1, "stages[].max_steps": 3, "optimizer.learning_rate": 0.1}
FEW_ROWS = {**SHORT, "rollout.max_rows": 4, "data.train[].count": 4, "stages[].max_steps": 2}
ROLLOUT = _under(
    "rollout",
    [
        ("engine", ("in_process", "engine.py:make"), "run", "error", SHORT),
        ("temperature", (1.0, 0.5), "run", ("requests", "rollouts"), SHORT),
        ("dtype", (LEFT_OUT, "bfloat16"), "run", "rollouts", SHORT),
        ("max_rows", (4, 32), "run", "rows", SHORT),
        ("memory_limit_mb", (1, 2), "run", "rows", {**SHORT, "rollout.max_rows": 4096}),
        ("start_order", ("longest_first", "issued"), "run", "requests", FEW_ROWS),
        ("vllm.cache_mb", (64, 128), "vllm", "gpu/kv_cache_memory_bytes", VLLM, (64 << 20, 128 << 20)),
        ("vllm.gpu_share", (0.3, 0.7), "vllm", "gpu/gpu_memory_utilization", VLLM, (0.3, 0.7)),
        ("vllm.eager", (False, True), "vllm", ("gpu/enforce_eager", "cpu/enforce_eager"), VLLM, (False, True)),
        ("vllm.adapters", (False, True), "vllm", "cpu/enable_lora", {**VLLM, "model.lora": {"rank": 8}}, (None, True)),
        (
            "vllm.engine_args",
            ({}, {"max_num_batched_tokens": 512}),
            "vllm",
            "gpu/max_num_batched_tokens",
            VLLM,
            (None, 512),
        ),
        ("vllm.keep_caches", (True, False), "vllm", "gpu/keep_caches", VLLM, (True, False)),
        ("replay", ("recorded-a", "recorded-b"), "run", "rollouts", {**SHORT, "rollout.engine": "replay"}),
        ("max_sampler_gap", (1e-12, 0.25), "run", "error", {**SHORT, "rollout.dtype": "bfloat16"}),
        ("weight_lag", (0, 1), "run", "rollouts", {**SHORT, "optimizer.learning_rate": 0.1}),
        ("max_staleness", (0, 1), "run", "metrics/queue/in_flight", SHORT),
    ],
)

HARD = {**SHORT, "data.train[].verifier": "reward.py:never"}
WEIGHTS = "model/weights"
ALGORITHM = _under(
    "algorithm",
    [
        ("loss", ("magic", "pg"), "run", WEIGHTS, SHORT),
        ("advantage", ("group", "rloo"), "run", WEIGHTS, SHORT),
        ("advantage_k", (2, 3), "run", WEIGHTS, {**SHORT, "algorithm.advantage": "pass_at_k"}),
        ("overlong_buffer", (LEFT_OUT, 6), "run", WEIGHTS, SHORT),
        ("reducer", (LEFT_OUT, "response_mean"), "run", WEIGHTS, SHORT),
        ("advantage_mask", ("none", "before"), "run", WEIGHTS, SHORT),
        ("clip_low", (0.2, 0.001), "run", ("metrics/learner/clip_ratio", WEIGHTS), SHORT),
        ("clip_high", (0.2, 0.001), "run", ("metrics/learner/clip_ratio", WEIGHTS), SHORT),
        ("reject_zero_advantage", (True, False), "run", "metrics/groups/trained", SHORT),
        ("stop_after_empty_steps", (1, 2), "run", "error", HARD, None, "steps in a row was rejected"),
        ("refill", ("none", "until_full"), "run", "requests", SHORT),
        ("refill_rounds", (1, 3), "run", "requests", {**HARD, "algorithm.refill": "until_full"}),
        (
            "minibatch",
            ("keep_n_sgd", "keep_d_t"),
            "run",
            "metrics/learner/sgd_steps",
            {**SHORT, "stages[].rollout_batch": 8},
        ),
        ("reuse", (1, 2), "run", "metrics/learner/sgd_steps", SHORT),
        ("correction", ("none", "tis"), "run", WEIGHTS, LAG),
        ("correction_cap", (1.01, 2.0), "run", WEIGHTS, {**LAG, "algorithm.correction": "tis"}),
        ("second_moment", (1e-4, 10.0), "run", WEIGHTS, {**LAG, "algorithm.correction": "m2po"}),
    ],
)

FIXED = {**SHORT, "entropy.controller": "fixed"}
ENTROPY = _under(
    "entropy",
    [
        ("controller", ("adaptive", "none"), "run", "metrics/entropy/c", SHORT),
        ("preset", ("report", "small"), "run", "metrics/entropy/c", {**SHORT, "entropy.target": 5.0}),
        ("alpha", (0.1, 0.2), "run", "metrics/entropy/alpha", FIXED, ([0.1, 0.1], [0.2, 0.2])),
        ("target", (0.5, 5.0), "run", "metrics/entropy/target", SHORT, ([0.5, 0.5], [5.0, 5.0])),
        ("step", (0.01, 0.02), "run", "metrics/entropy/c", {**SHORT, "entropy.target": 5.0}),
        (
            "maximum",
            (0.004, 0.5),
            "run",
            "metrics/entropy/c",
            {**SHORT, "entropy.target": 5.0, "entropy.step": 0.02, "stages[].max_steps": 3},
        ),
        (
            "estimator",
            ("exact", "sampled"),
            "run",
            "metrics/entropy/alpha",
            {**SHORT, "entropy.controller": "control.py:make"},
        ),
    ],
)
REFERENCE = _under(
    "reference",
    [
        ("mode", ("none", "monitor"), "run", "metrics/learner/kl", SHORT),
        ("model", (LEFT_OUT, "other-model"), "run", "metrics/learner/kl", {**SHORT, "reference.mode": "monitor"}),
        ("coefficient", (0.1, 2.0), "run", WEIGHTS, {**SHORT, "reference.mode": "loss", "reference.coefficient": 0.1}),
    ],
)


TEACHER_KL = "metrics/learner/teacher_kl"
UNREJECTED = {**SHORT, "algorithm.reject_zero_advantage": False}
TAUGHT = {**UNREJECTED, "teacher.model": "other-model"}
TEACHER = _under(
    "teacher",
    [
        ("model", ("other-model", LEFT_OUT), "run", TEACHER_KL, {**UNREJECTED, "teacher.prompt": "{prompt}"}),
        ("server", ("http://localhost:9/v1", "http://localhost:9/v2"), "checks", "error", UNREJECTED),
        ("prompt", (LEFT_OUT, "{prompt} 1"), "run", TEACHER_KL, TAUGHT),
        ("coefficient", (1.0, 0.5), "run", WEIGHTS, TAUGHT),
        ("with_rewards", (False, True), "run", WEIGHTS, TAUGHT),
    ],
)


def optimizer_rows(observer: str, recipe: str, short: Mapping[str, Any]) -> list[Row]:
    """Return AdamW's rows without the learning rate."""
    return _under(
        "optimizer",
        [
            ("beta1", (0.9, 0.5), observer, WEIGHTS, short),
            ("beta2", (0.999, 0.9), observer, WEIGHTS, short),
            ("eps", (1e-8, 0.1), observer, WEIGHTS, short),
            ("weight_decay", (0.0, 0.5), observer, WEIGHTS, short),
            ("max_grad_norm", (1e-4, 100.0), observer, WEIGHTS, {**short, "optimizer.eps": 1e-3}),
        ],
        recipe=recipe,
    )


OPTIMIZER = [
    *optimizer_rows("run", "train", SHORT),
    *_under(
        "optimizer",
        [
            ("kind", ("adamw", "muon"), "run", WEIGHTS, SHORT),
            ("momentum", (0.95, 0.5), "run", WEIGHTS, {**SHORT, "optimizer.kind": "muon"}),
            ("learning_rate", (0.02, 0.01), "run", ("rates", WEIGHTS), SHORT),
            ("warmup_steps", (0, 4), "run", ("rates", WEIGHTS), SHORT),
        ],
    ),
]

STAGE = "stages[]"
LONG = {"stages[].max_steps": 150, "stages[].transition.rule": "converged"}
STAGES = _under(
    STAGE,
    [
        ("max_tokens", (8, 4), "run", ("requests", "rollouts"), SHORT),
        ("rollout_batch", (4, 2), "run", "requests", SHORT),
        ("mini_batch", (2, 4), "run", "metrics/learner/sgd_steps", SHORT),
        ("group_size", (6, 4), "run", "requests", SHORT),
        ("min_steps", (0, 120), "schedule", "steps", LONG),
        ("max_steps", (2, 3), "schedule", "steps", {}, ([2], [3])),
        ("transition.rule", ("converged", "fixed"), "schedule", "steps", LONG),
        ("transition.horizon", (1, 60), "schedule", "steps", LONG),
        ("transition.delta", (0.005, 0.1), "schedule", "steps", LONG),
        ("transition.window", (4, 30), "schedule", "steps", LONG),
        ("transition.confidence", (0.55, 0.999), "schedule", "steps", {**LONG, "stages[].transition.window": 5}),
        (
            "transition.truncation_below",
            (0.5, 0.05),
            "schedule",
            "steps",
            {**LONG, "stages[].transition.rule": "truncation"},
        ),
        ("temperature", (LEFT_OUT, 0.5), "run", ("requests", "rollouts"), SHORT),
        ("entropy_target", (LEFT_OUT, 5.0), "run", "metrics/entropy/target", SHORT),
        (
            "kl_coefficient",
            (LEFT_OUT, 2.0),
            "run",
            WEIGHTS,
            {**SHORT, "reference.mode": "loss", "reference.coefficient": 0.1},
        ),
        ("clip_low", (LEFT_OUT, 0.001), "run", ("metrics/learner/clip_ratio", WEIGHTS), SHORT),
        ("clip_high", (LEFT_OUT, 0.001), "run", ("metrics/learner/clip_ratio", WEIGHTS), SHORT),
        ("reuse", (LEFT_OUT, 2), "run", "metrics/learner/sgd_steps", SHORT),
        ("learning_rate", (LEFT_OUT, 0.01), "run", ("rates", WEIGHTS), SHORT),
    ],
)

TESTED = {"evaluation.every": 0, "stages[].max_steps": 1}
TEST = "evaluations/after-held_out"
VALIDATED = {"data.test": {}, "stages[].max_steps": 2}
EVALUATION = _under(
    "evaluation",
    [
        ("every", (1, 2), "run", "metrics/validation/accuracy/mean", VALIDATED),
        ("validation_samples", (1, 2), "run", "requests", VALIDATED),
        ("validation_temperature", (1.0, 0.5), "run", "requests", VALIDATED),
        ("temperatures", ([1.0], [1.0, 0.5]), "run", (TEST, "requests"), TESTED),
        ("samples", (2, 3), "run", (TEST, "requests"), TESTED),
        ("pass_at", ([2], [1, 2]), "run", TEST, TESTED),
        ("start_pass_at", (LEFT_OUT, 4), "run", "evaluations/before-held_out", TESTED),
        ("max_tokens", (LEFT_OUT, 4), "run", (TEST, "requests"), TESTED),
    ],
)

JUDGED = {"verifier.judge": {"base_url": "http://localhost/v1", "model": "m"}}


def _judged(script: str = "score", **further: Any) -> dict[str, Any]:
    return {**JUDGED, "verifier.judge.extra": {"script": script}} | {
        f"verifier.judge.{key}": value for key, value in further.items()
    }


VERIFIER = _under(
    "verifier",
    [
        ("reasoning", ("auto", "required"), "verdicts", "verdicts", {"verifier.extract": "box"}),
        ("extract", ("lenient", "box"), "verdicts", "verdicts"),
        ("time_limit", (3.0, 4.0), "workers", "verifier/cpu_limit"),
        ("workers", (1, 2), "workers", "verifier/count", {}, (1, 2)),
        ("memory_limit_mb", (512, 1024), "workers", "verifier/hello"),
        (
            "stop_after_unjudged_steps",
            (1, 2),
            "run",
            "error",
            {**SHORT, "data.train[].verifier": "reward.py:nothing"},
            None,
            "steps in a row could be judged",
        ),
        ("judge.base_url", ("http://localhost/v1", "http://localhost/v2"), "judge", "paths", _judged()),
        ("judge.model", ("m", "n"), "judge", "bodies", _judged()),
        ("judge.endpoint", ("classify", "pooling"), "judge", "verdicts", _judged()),
        ("judge.key_variable", ("OPENAI_API_KEY", "TABLE_KEY"), "judge", "keys", _judged()),
        ("judge.prompt", (LEFT_OUT, "Is {response} right?"), "judge", "bodies", _judged()),
        ("judge.read", ("score", "boxed"), "judge", "verdicts", _judged("both")),
        ("judge.lowest", (0.0, 0.5), "judge", "verdicts", _judged()),
        ("judge.highest", (1.0, 0.8), "judge", "verdicts", _judged()),
        ("judge.right_from", (1.0, 0.5), "judge", "verdicts", _judged()),
        ("judge.temperature", (0.0, 0.7), "judge", "bodies", _judged()),
        ("judge.max_tokens", (16, 32), "judge", "bodies", _judged()),
        ("judge.unreadable_attempts", (1, 2), "judge", "count", _judged("unreadable", temperature=0.5), (2, 4)),
        ("judge.concurrency", (1, 6), "judge", "most under way", _judged("slow")),
        ("judge.attempts", (1, 2), "judge", "count", _judged("down")),
        ("judge.attempt_seconds", (5.0, 7.0), "judge", "limits", _judged()),
        ("judge.token_budget", (LEFT_OUT, 1), "judge", "failed", _judged("slow", concurrency=1)),
        ("judge.cache", (LEFT_OUT, "kept"), "judge", "cache", _judged()),
        ("judge.extra", ({"top_p": 0.5}, {"top_p": 0.9}), "judge", "bodies", JUDGED),
    ],
)

GAME = {
    **SHORT,
    "start.model": "wide-model",
    "data.train": [{"family": "guess_number", "count": 4, "options": {"largest": 31}}],
    "environment": {"max_turns": 3, "max_observation_tokens": 12},
    "stages[].max_tokens": 24,
    "stages[].max_steps": 1,
}
ENVIRONMENTS = _under(
    "environment",
    [
        ("max_turns", (1, 3), "episodes", "rollouts", GAME),
        ("max_observation_tokens", (1, 12), "episodes", "rollouts", GAME),
        ("time_limit", (3.0, 4.0), "workers", "environment/cpu_limit", {}, (3.0, 4.0)),
        ("workers", (1, 2), "workers", "environment/count", {}, (1, 2)),
        ("memory_limit_mb", (512, 1024), "workers", "environment/memory_limit_mb", {}, (512, 1024)),
    ],
)

FOUR = {**SHORT, "stages[].max_steps": 4}


def _steps(*steps: int) -> list[str]:
    return [f"step-{step:06d}" for step in steps]


KEPT = "files/checkpoints"
CHECKPOINT = _under(
    "checkpoint",
    [
        ("every", (1, 3), "run", KEPT, FOUR, (_steps(1, 2, 3, 4), _steps(3, 4))),
        ("keep_last", (1, 2), "run", KEPT, FOUR, (_steps(4), _steps(3, 4))),
        ("keep_best", (True, False), "run", KEPT, {**VALIDATED, "checkpoint.keep_last": 1, "stages[].max_steps": 3}),
    ],
)
TRACKED = {**COMMAND, "logging.trackers": ["tracker.py:Recorder"]}
LOGGING = _under(
    "logging",
    [
        (
            "rollouts_every",
            (1, 2),
            "run",
            "files/rollouts",
            SHORT,
            ([f"step-00000{n}.parquet" for n in (1, 2)], ["step-000002.parquet"]),
        ),
        ("samples", (1, 2), "run", TEST, TESTED),
        ("trackers", ([], ["tracker.py:Recorder"]), "command", "tracked", COMMAND),
        ("project", ("one", "two"), "command", "tracked", TRACKED),
    ],
)

ON_RAY = {**VLLM, "run.device": "auto", "model.dtype": "float32"}
RANKS = {**ON_RAY, "cluster": {"learner": {"ranks": 4}, "rollout": {"weight_copy": "object_store"}}}
COPIES = "cluster.rollout.weight_copy"
CLUSTER = _under(
    "cluster",
    [
        ("address", ("ray-one:6379", "ray-two:6379"), "cluster", "init", RANKS),
        ("learner.ranks", (2, 4), "cluster", "ranks", RANKS, (2, 4)),
        ("learner.sequence_parallel", (1, 2), "fsdp", "sequence", RANKS, (None, 2)),
        ("learner.shard_ranks", (4, 2), "fsdp", "mesh", RANKS, ((4,), (2, 2))),
        ("learner.reduce_dtype", ("float32", "bfloat16"), "fsdp", "reduce_dtype", RANKS),
        ("learner.reduce_once", (False, True), "fsdp", "pass", RANKS),
        ("learner.offload_optimizer", (False, True), "fsdp", "offload", RANKS, ("OffloadPolicy", "CPUOffloadPolicy")),
        ("learner.restarts", (0, 2), "cluster", "launches", {**RANKS, "run.name": "ranks die"}, (1, 3)),
        ("rollout.replicas", (1, 2), "cluster", "replicas", RANKS, (1, 2)),
        ("rollout.tensor_parallel", (1, 2), "cluster", "replica/num_gpus", RANKS, (1, 2)),
        ("rollout.cpus", (1.0, 2.0), "cluster", "replica/num_cpus", RANKS, (1.0, 2.0)),
        ("rollout.threads", (1, 3), "cluster", "replica/threads", RANKS, (1, 3)),
        (
            "rollout.colocated",
            (False, True),
            "cluster",
            "replica/num_gpus",
            {**RANKS, "cluster.rollout.replicas": 4},
            (1, 0),
        ),
        ("rollout.weight_copy", ("object_store", "direct"), "cluster", "pool", RANKS, ("EnginePool", "GroupPool")),
        ("rollout.restarts", (0, 1), "cluster", "lost", {**RANKS, "run.name": "replicas die"}),
        ("verifier.workers_per_node", (1, 3), "cluster", "judge/workers", RANKS, (1, 3)),
        (
            "timeouts.connect",
            (5.0, 60.0),
            "cluster",
            "waits/connect",
            {**RANKS, "cluster.address": "ray-one:6379"},
            (5.0, 60.0),
        ),
        ("timeouts.start", (50.0, 60.0), "cluster", ("waits/start", "waits/warm_up"), RANKS, ([50.0], [60.0])),
        ("timeouts.generate", (1e-9, 60.0), "cluster", "lost", RANKS),
        ("timeouts.load_weights", (50.0, 60.0), "cluster", "waits/load", RANKS, ([50.0], [60.0])),
        ("timeouts.judge", (50.0, 60.0), "cluster", "waits/judge", RANKS, ([50.0], [60.0])),
        ("timeouts.learner", (50.0, 60.0), "cluster", "waits/open_store", RANKS, ([50.0], [60.0])),
    ],
)

TINY = "model.tiny"
IN_SFT = "phases[].data"
SHOWN = {"phases": [{key: value for key, value in PHASE.items() if key not in ("family", "options")}]}


def shown_rows() -> list[Row]:
    """Return rows of a supervised phase's source, whose effect is the demonstrations of the phase."""
    file = {**SHOWN, IN_SFT: {"path": "source.jsonl"}}
    rows = {row.setting: row for row in source_rows(IN_SFT, "shown")}
    found: list[Row] = []
    special: dict[str, tuple[Any, ...]] = {
        # worked solutions are recorded, so a family and its seed are rejected
        "family": ((LEFT_OUT, "running_sum"), "error", file),
        "seed": ((0, 1), "error", file),
        "split": (("train", "test"), "hub", {**SHOWN, IN_SFT: {"hub": "one/set"}}),
        "options": (({"subset": "a"}, {"subset": "b"}), "hub", {**SHOWN, IN_SFT: {"hub": "one/set"}}),
        "environment": ((LEFT_OUT, ENVIRONMENT), "shown", file),
    }
    for setting, row in rows.items():
        key = setting.removeprefix(f"{IN_SFT}.")
        values, sees, base = row.values, row.sees, {**SHOWN, **row.base}
        if key in special:
            values, sees, base = special[key][0], (special[key][1],), special[key][2]
        elif key == "fields.answer":
            values = (LEFT_OUT, "truth")
        elif key == "fields.id":
            values, sees = (LEFT_OUT, "same"), ("error",)
        elif key == "fields.level":
            base, sees = {**file, f"{IN_SFT}.levels": [1]}, ("error",)
        elif key == "verifier":
            values = ("maths", "code")
        found.append(
            Row(setting=setting, observer="shown", values=values, sees=sees, base=base, gives=None, recipe="sft")
        )
    return found


NO_TINY = {"model": {}}
SFT_ROWS = [
    *_under(
        "run",
        [
            ("name", ("one", "two"), "command", "folders", {}, (["runs/models/one"], ["runs/models/two"])),
            ("seed", (3, 4), "sft", "losses"),
            ("output", ("one", "two"), "command", "folders", {}, (["one"], ["two"])),
            ("threads", (1, 2), "sft", "threads", {}, (1, 2)),
            ("device", ("cpu", "cuda"), "sft_start", "error", {}, None, "CUDA"),
            ("expected_minutes", (3.0, 7.0), "minutes", "said"),
        ],
        recipe="sft",
    ),
    *_under(
        "model",
        [
            ("tiny.hidden_size", (16, 32), "sft_start", "hidden_size", {}, (16, 32)),
            ("tiny.layers", (1, 2), "sft_start", "num_hidden_layers", {}, (1, 2)),
            ("tiny.heads", (1, 2), "sft_start", "num_attention_heads", {}, (1, 2)),
            ("tiny.intermediate_size", (16, 24), "sft_start", "intermediate_size", {}, (16, 24)),
            ("tiny.max_context", (64, 80), "sft_start", "max_context", {}, (64, 80)),
            ("folder", ("model", "other-model"), "sft_start", "weights", NO_TINY),
            ("gguf_package", ("one", "two"), "sft_start", "packages", NO_TINY, (["one"], ["two"])),
        ],
        recipe="sft",
    ),
    *_under(
        "phases[]",
        [
            ("family", ("running_sum", "guess_number"), "shown", "shown", {"phases[].options": {}}),
            ("options", ({"max_tokens": 24}, {"level_shares": "2:1.0"}), "shown", "shown"),
            ("levels", ([2], [3]), "shown", "shown"),
            ("holdout", (0, 3), "shown", "shown", {**SHOWN, IN_SFT: {"path": "source.jsonl"}}),
            ("steps", (2, 3), "sft", ("losses", "rates")),
            ("batch_size", (4, 5), "sft", ("losses", "tokens")),
            ("learning_rate", (0.01, 0.02), "sft", ("rates", WEIGHTS)),
            ("warmup_steps", (0, 2), "sft", "rates"),
            ("decay", ("constant", "linear"), "sft", "rates"),
        ],
        recipe="sft",
    ),
    *shown_rows(),
    *model_rows("training", "sft", "sft", {}),
    *_under(
        "training",
        [
            ("entropy_clamp", (0.0, 0.5), "sft", "error"),
            ("router_replay", (False, True), "sft", "error"),
            ("exact", (False, True), "sft", "error"),
        ],
        recipe="sft",
    ),
    *optimizer_rows("sft", "sft", {}),
]

ROWS: tuple[Row, ...] = (
    *RUN,
    *START,
    *MODEL,
    *DATA,
    *ROLLOUT,
    *ALGORITHM,
    *ENTROPY,
    *REFERENCE,
    *TEACHER,
    *OPTIMIZER,
    *STAGES,
    *EVALUATION,
    *VERIFIER,
    *ENVIRONMENTS,
    *CHECKPOINT,
    *LOGGING,
    *CLUSTER,
    *SFT_ROWS,
)
