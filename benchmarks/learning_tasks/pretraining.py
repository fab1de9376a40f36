"""Trains a start model on all tokens of conversations, the environment's too: `turnwise sft` trains on the model's turns only, in
which so small a model has few words from which to learn to copy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

__all__ = ["train_on_all_tokens"]

CYCLES, WARM_UP, BATCH, LR = 2, 40, 16, 3e-3


def train_on_all_tokens(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[dict[str, Any]]],
    steps: int,
    folder: Path,
) -> None:
    """Train twice for `steps`, each time with AdamW and a learning rate that falls to 0.02 of the first, and write the model to
    `folder`."""
    texts = [str(tokenizer.apply_chat_template(list(messages), tokenize=False)) for messages in conversations]
    data = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    model.train()
    for cycle in range(CYCLES):
        random.Random(cycle).shuffle(data)
        _train(model, data, tokenizer.pad_token_id, steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(model: Qwen3ForCausalLM, data: Sequence[list[int]], pad: int, steps: int) -> None:
    """One cycle of the learning rate. Each conversation is trained on before one is repeated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / WARM_UP) * max(0.02, 1 - step / steps)
    )
    for step in range(steps):
        chosen = [data[number % len(data)] for number in range(step * BATCH, (step + 1) * BATCH)]
        longest = max(map(len, chosen))
        tokens_BT = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in chosen])
        labels_BT = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in chosen])
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
