"""Make the demo's model and its questions: `python demo/make_model.py`, a few minutes on two cores.

Trains a byte-level BPE on the demo's own conversations, builds a Qwen3 of 0.7 million parameters, and warm-starts it in two
steps, by the library's own fine-tuning (`turnwise.sft.replay`): first it learns how the questions are answered, then, briefly, it
learns the habits of a sloppy student (`student.py`). What comes out has the skill under the sloppiness, which is what
reinforcement learning is good at removing. Writes demo/model/, demo/train.jsonl and demo/heldout.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from questions import questions
from student import Habits, Trace, converse
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turnwise.chat.renderer import Renderer
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tool
from turnwise.options.algorithm import Nll, OptimizationSection
from turnwise.sft.replay import problems, replay, weigh
from turnwise.training.batch import pack
from turnwise.training.learner import UpdateStats
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Row, Sampling

HERE = Path(__file__).resolve().parent
TOOLS = [Tool.of(calculator).schema]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# A newline is always a piece of its own: what follows a cue is then cut the same whether it is written or sampled.
PIECES = r" ?\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+"
VOCABULARY = 760
BATCH = 32
TRAIN, HELDOUT = 2048, 256

CAREFUL = Habits(wrong=0.25, wrong_again=0.25, guess=0.05, garbled=0.05)
SLOPPY = Habits(wrong=0.64, wrong_again=0.58, guess=0.08, garbled=0.04)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One step of the warm start. In a lesson without mistakes the student makes them, but the model learns only the rest."""

    name: str
    habits: Habits
    mistakes: bool
    steps: int
    peak: float
    """The highest learning rate; it is reached after `warmup` steps and decays to a tenth by a cosine."""
    warmup: int = 20


LESSONS = (
    Lesson(name="skill", habits=CAREFUL, mistakes=False, steps=600, peak=3e-3),
    Lesson(name="sloppiness", habits=SLOPPY, mistakes=True, steps=100, peak=1e-3),
)


def make_tokenizer(traces: Sequence[Trace]) -> PreTrainedTokenizerFast:
    """Train the BPE on rendered conversations. Byte level, no normaliser: any text comes back as it was."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    template = (HERE / "chat_template.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((render(tokenizer, trace) for trace in traces), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=template, eos_token=END, pad_token=PAD, model_max_length=2048
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def render(tokenizer: PreTrainedTokenizerFast, trace: Trace) -> str:
    return tokenizer.apply_chat_template(trace.messages, tools=TOOLS, tokenize=False)


def teach(
    model: Qwen3ForCausalLM, renderer: Renderer, lesson: Lesson, rng: random.Random, heldout: Container[str] = ()
) -> None:
    """Fine-tuning on fresh conversations of one lesson, none about a question in `heldout`."""
    conversations = _conversations(lesson, rng, heldout)
    learner = LocalLearner(
        model, sampling=Sampling(), loss=make_loss(Nll()), optimizer=OptimizationSection(betas=(0.9, 0.98))
    )
    started = time.perf_counter()
    for step in range(lesson.steps):
        traces = islice(conversations, BATCH)
        rows = [_row(number, trace, mistakes=lesson.mistakes) for number, trace in enumerate(traces)]
        progress = step / lesson.steps
        lr = lesson.peak * min(1.0, (step + 1) / lesson.warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))
        update = asyncio.run(_step(learner, renderer, rows, lr))
        if step % 50 == 0 or step == lesson.steps - 1:
            print(f"{lesson.name} {step:4d}  loss {update.loss:.3f}  {time.perf_counter() - started:.0f} s", flush=True)


def _row(number: int, trace: Trace, *, mistakes: bool) -> Row:
    weights = [1.0 if mistakes or not mistake else 0.0 for mistake in trace.mistakes]
    return Row(id=str(number), messages=trace.messages, fields={"tools": TOOLS, "weights": weights})


async def _step(learner: LocalLearner, renderer: Renderer, rows: Sequence[Row], lr: float) -> UpdateStats:
    trajectories = await replay(rows, renderer)
    trained = [trajectory for trajectory in trajectories if weigh(trajectory)]
    assert len(trained) == len(rows), problems(trajectories, context=None)
    return await learner.update([pack(trained, share_prompts=learner.requirements.share_prompts)], lr=lr)


def _conversations(lesson: Lesson, rng: random.Random, heldout: Container[str]) -> Iterator[Trace]:
    # not sorted by length, which would save padding: batches of one kind of question teach far less a step
    while True:
        for row in questions(rng.getrandbits(32), 512, without=heldout):
            yield converse(rng, row, lesson.habits)


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a directory that transformers 4 and 5, and the engines built on them, can load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 reads this name too, 4 knows no other
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's model and its questions.")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to (default: demo/)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)

    rows = questions(arguments.seed, TRAIN + HELDOUT)
    heldout = {row["prompt"][0]["content"] for row in rows[TRAIN:]}
    tokenizer = make_tokenizer([converse(rng, row, SLOPPY) for row in rows[:1000]])
    model, renderer = make_model(tokenizer), Renderer(tokenizer)
    prompt = tokenizer.apply_chat_template(rows[0]["prompt"], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, a prompt of {len(prompt)}")
    for lesson in LESSONS:
        teach(model, renderer, lesson, rng, heldout)

    arguments.out.mkdir(parents=True, exist_ok=True)
    save(arguments.out / "model", model, tokenizer)
    write_rows(arguments.out / "train.jsonl", rows[:TRAIN])
    write_rows(arguments.out / "heldout.jsonl", rows[TRAIN:])


if __name__ == "__main__":
    main()
