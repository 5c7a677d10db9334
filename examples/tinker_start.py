"""Make what tinker-cookbook's ``rl_loop.py`` loads from a hub: a tiny model and problems, in folders of those names.

    python tinker_start.py

The script needs a model name of the cookbook's list and the data set ``openai/gsm8k``, and it takes both from folders
of the working directory that have these names. The task is the number after a digit, and the model's last training
answers were mostly guesses, so that it is right in one of three.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL, DATA = Path("Qwen/Qwen3-8B-Base"), Path("openai/gsm8k")
# The conversation that rl_loop.py shows the model before each question.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOT = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9. \\boxed{3}"
)


def question(digit: int) -> str:
    """Return a problem."""
    return f"What comes after {digit}?"


def turns(digit: int) -> list[str]:
    """Return the pieces that the cookbook's renderer ``role_colon`` encodes, up to the answer."""
    shot = ["User:", f" How many r's are in strawberry?{SUFFIX}\n\n", "Assistant:", f" {SHOT}\n\n"]
    return [*shot, "User:", f" {question(digit)}{SUFFIX}\n\n", "Assistant:"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the conversation, with a token per digit."""
    backend = Tokenizer(models.BPE())
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["".join(turns(digit)) + f" \\boxed{{{digit + 1}}}" for digit in range(10)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, batch: int) -> None:
    """Train the model on answers, with a loss on their tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        rows, labels = [], []
        for _ in range(batch):
            digit = random.randrange(10)
            prompt = [token for piece in turns(digit) for token in tokenizer.encode(piece)]
            # Guesses at the end, which reinforcement learning can unlearn.
            guess = step > 0.8 * steps and random.random() < 2 / 3
            number = random.randrange(1, 11) if guess else digit + 1
            answer = [*tokenizer.encode(f" \\boxed{{{number}}}"), tokenizer.eos_token_id]
            answer += [tokenizer.eos_token_id] * (len(tokenizer.encode(" \\boxed{10}")) + 1 - len(answer))
            rows.append(prompt + answer)
            labels.append([-100] * len(prompt) + answer)
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    """Write the model and the data."""
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    train(model, tokenizer, steps=300, batch=32)
    model.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    digits = [random.randrange(10) for _ in range(2000)]
    rows = {"question": [question(d) for d in digits], "answer": [f"#### {d + 1}" for d in digits]}
    (DATA / "main").mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(rows).to_parquet(DATA / "main" / "train.parquet")
    files = "{split: train, path: main/train.parquet}"
    (DATA / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files: [{files}]\n---\n")


if __name__ == "__main__":
    main()
