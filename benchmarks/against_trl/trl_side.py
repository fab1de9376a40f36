"""TRL's side, run in the peer's own environment: `python trl_side.py DIR STEPS`.

Says one JSON object a step on stdout and takes the next one after a line on stdin.

GRPOTrainer with a tool, as its documentation has it, generating with transformers: what TRL does where there is no GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import load_dataset
from task import calculator, right
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    return [
        right(messages[-1].get("content") or "", truth) for messages, truth in zip(completions, answer, strict=True)
    ]


class Clock(TrainerCallback):
    """Takes a step when it is told to, and tells its wall time."""

    def __init__(self) -> None:
        self.started = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.tell({"step": 0})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            seconds = time.perf_counter() - self.started
            figures = {"seconds": seconds, "reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            self.tell({"step": state.global_step, **figures})

    def tell(self, figures: dict[str, float]) -> None:
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()
        self.started = time.perf_counter()


def main() -> None:
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        options = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=128,
            num_generations=8,
            max_steps=steps,
            shuffle_dataset=False,
            max_completion_length=160,
            max_tool_calling_iterations=3,
            temperature=1.0,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.0,
            loss_type="grpo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
            reward_funcs=reward,
            tools=[calculator],
            train_dataset=load_dataset("json", data_files=f"{folder}/train.jsonl", split="train", cache_dir=scratch),
            args=options,
            callbacks=[Clock()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
