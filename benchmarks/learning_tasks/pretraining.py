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

WARM_UP, BATCH, LR = 20, 16, 3e-3


def train_on_all_tokens(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[dict[str, Any]]],
    steps: int,
    folder: Path,
) -> None:
    """Train with AdamW, the learning rate falling to 0.02 of the first, and write the model to `folder`."""
    torch.manual_seed(0)
    draws = random.Random(0)
    texts = [str(tokenizer.apply_chat_template(list(messages), tokenize=False)) for messages in conversations]
    data = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / WARM_UP) * max(0.02, 1 - step / steps)
    )
    model.train()
    for _ in range(steps):
        chosen = draws.choices(data, k=BATCH)
        longest = max(map(len, chosen))
        tokens_BT = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in chosen])
        labels_BT = torch.tensor([ids + [-100] * (longest - len(ids)) for ids in chosen])
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
