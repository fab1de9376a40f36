"""The model that all runs start from, and the data of all tasks: `make_data`, `prepare(folder)`.

A Qwen3 of 40,000 parameters with a byte-level tokenizer. `turnwise sft` fine-tunes it on conversations of a random policy, so
that it writes valid actions with known probabilities, and the docstrings of the tasks can compute with them. The model is the
same for all seeds of the benchmark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from learning_tasks import digging, doors, guessing
from learning_tasks.fine_tuning import fine_tune

__all__ = ["make_data", "prepare"]

MARKS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD, END = 0, 1
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONVERSATIONS, STEPS = 4096, 240
ROWS, HELD_OUT = 2048, 128


def make_data() -> dict[str, str]:
    """The data files by name, as JSON lines: the conversations of the warm start, and the rows of the tasks."""
    rng = random.Random(0)
    makers = (doors.random_conversation, digging.random_conversation, guessing.random_conversation)
    files: dict[str, list[dict[str, Any]]] = {
        "conversations": [{"messages": makers[number % 3](rng)} for number in range(CONVERSATIONS)],
        "doors": [doors.new_row(rng) for _ in range(ROWS)],
        "digging": [digging.new_row(rng) for _ in range(ROWS)],
        "one_try": [guessing.new_row(rng, 1) for _ in range(ROWS)],
        "two_tries": [guessing.new_row(rng, 2) for _ in range(ROWS)],
        "held_out": [guessing.new_row(rng, 2) for _ in range(HELD_OUT)],
    }
    return {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in files.items()}


def prepare(folder: Path, data: dict[str, str]) -> None:
    """Write the data, and the model to `folder/start/checkpoint` unless it is there, which takes 40 seconds on one core."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in data.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    if (folder / "ready").exists():
        return
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    options = {
        "model.path": folder / "random",
        "sft.steps": STEPS,
        "sft.batch_size": 64,
        "sft.lr": 3e-3,
        "sft.warmup_steps": 10,
        "sft.lr_schedule": "cosine",
    }
    fine_tune(folder, options)


def make_tokenizer(texts: Sequence[str] = (), size: int = 0) -> PreTrainedTokenizerFast:
    """One token for each byte, and one for each mark of the chat template; with texts, also for their most frequent parts of
    words, up to a vocabulary of `size`."""
    vocabulary = {symbol: index for index, symbol in enumerate([*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(texts))
    if texts:
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(MARKS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        core.train_from_iterator(texts, trainer)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, width: int = 32) -> Qwen3ForCausalLM:
    """The model with random weights. `width` is its hidden size, a multiple of 8."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = PAD
    return model
