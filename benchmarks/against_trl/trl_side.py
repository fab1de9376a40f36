"""TRL's side, which runs in TRL's own Python environment: `python trl_side.py SETTINGS`, where SETTINGS is a JSON object.

Writes one JSON object for each step to stdout, and begins a step when it reads a line from stdin.

GRPOTrainer with a tool, as in its documentation. It generates with transformers, as TRL does without a GPU.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from itertools import count
from typing import Any

import torch
from datasets import load_dataset
from digits import digits
from slow_tool import slow_calculator
from task import calculator, right
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_game import reward as game_reward
from trl_game import rollout


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    return [
        right(messages[-1].get("content") or "", truth) for messages, truth in zip(completions, answer, strict=True)
    ]


def digits_reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    return [digits(messages[-1].get("content") or "") for messages in completions]


class Clock(TrainerCallback):
    """Begins a step when it reads a line, and writes the step's wall time, reward and peak memory."""

    def __init__(self) -> None:
        self.started = self.cpu = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.tell({"step": 0})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            seconds = time.perf_counter() - self.started
            figures = {"seconds": seconds, "reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            cpu = time.process_time() - self.cpu
            self.tell({"step": state.global_step, "peak": peak, "cpu": cpu, **figures})

    def tell(self, figures: dict[str, float]) -> None:
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()
        self.started, self.cpu = time.perf_counter(), time.process_time()


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder, large, plays = settings["folder"], settings["model"] == "135m", settings["model"] == "smollm2"
    torch.set_num_threads(settings["threads"])
    conversations = settings["rows"] * settings["samples"]
    micro_batch = settings["trl_micro_batch"] or conversations
    numbers = count()
    tool = (
        slow_calculator(settings["tool_median"], lambda: str(next(numbers))) if settings["tool_median"] else calculator
    )
    with tempfile.TemporaryDirectory() as scratch:
        options = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=conversations // micro_batch,
            num_generations=settings["samples"],
            max_steps=settings["steps"],
            seed=settings["seed"],
            shuffle_dataset=False,
            max_completion_length=settings["tokens"],
            max_tool_calling_iterations=None if large or plays else 3,
            temperature=1.0,
            learning_rate=settings["lr"] or (1e-6 if large else 1e-5 if plays else 3e-4),
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.0,
            loss_type="grpo",
            use_cpu=True,
            bf16=settings["dtype"] == "bfloat16",
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
            reward_funcs=game_reward if plays else digits_reward if large else reward,
            tools=None if large or plays else [tool],
            rollout_func=rollout if plays else None,
            train_dataset=load_dataset(
                "json", data_files=f"{folder}/{'trl' if plays else 'train'}.jsonl", split="train", cache_dir=scratch
            ),
            args=options,
            callbacks=[Clock()],
        )
        trainer.train()
        if plays:
            trainer.save_model(f"{settings['out']}/trl")


if __name__ == "__main__":
    main()
