"""Speed of the embedded engine, compared with two simple ways to sample conversations of several turns.

    python benchmarks/local_engine.py                    # about a minute on 2 cores
    python benchmarks/local_engine.py --conversations 32 --repeats 5 --group 8
    python benchmarks/local_engine.py --device cuda --size 0.5B --conversations 32 256

Each conversation has a prompt of about 128 tokens and four turns. After each turn its environment adds 16 tokens. Turns have
different lengths, 32 tokens on average. All prompts are different; with `--group 8`, groups of 8 conversations have the same
prompt, as in training, which favours the embedded engine. The model is a Qwen3 of 0.92M parameters with random weights;
`--size 0.5B` uses the shape of Qwen2.5-0.5B, in bfloat16. The benchmark compares:

- embedded: `LocalEngine`, as turnwise uses it;
- re-prefilling: the same engine, but its cache is cleared after each turn, and no prefix is shared;
- lock-step: `model.generate` of transformers on a left-padded batch: all conversations wait for the longest turn, and each turn
  computes the complete history again. It computes no log-probabilities here, so it does less work than the other two.

Prints the sampled tokens per second, and in the last line `local_engine_speedup <embedded / lock-step at 32 conversations>`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.engines.local import LocalEngine
from turnwise.types import Request, Sampling

VOCABULARY, TURNS, BRIDGE = 1024, 4, 16


@dataclass(frozen=True)
class Script:
    """One conversation: its prompt, the length of each turn, and the tokens after each turn."""

    name: str
    prompt: list[int]
    lengths: list[int]
    bridges: list[list[int]]


SIZES = {
    "0.9M": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151936,
    },
}


def make_model(size: str, device: str) -> Qwen3ForCausalLM:
    """Random weights; large ones in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3Config(
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **SIZES[size],
    )
    model = Qwen3ForCausalLM(config).eval()
    return (model if size == "0.9M" else model.to(torch.bfloat16)).to(device)  # type: ignore[arg-type]


def make_scripts(count: int, seed: int, group: int = 1) -> list[Script]:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, VOCABULARY, draw.integers(112, 145)).tolist() for _ in range(count)]
    return [
        Script(
            name=f"{seed}/{index}",
            prompt=prompts[index // group],
            lengths=draw.integers(16, 49, TURNS).tolist(),
            bridges=[draw.integers(0, VOCABULARY, BRIDGE).tolist() for _ in range(TURNS)],
        )
        for index in range(count)
    ]


async def converse(engine: LocalEngine, scripts: list[Script], *, forget: bool) -> None:
    """All conversations concurrently; none waits for another."""

    async def one(script: Script) -> None:
        history = list(script.prompt)
        for turn, length in enumerate(script.lengths):
            sampling = Sampling(max_tokens=length)
            said = await engine.generate(
                Request(conversation=script.name, token_ids=history, sampling=sampling, seed=turn)
            )
            history += [*said.token_ids, *script.bridges[turn]]
            if forget:  # as after a change of the weights: cached keys and values are not used again
                await engine.load_weights(0)
        engine.release(script.name)

    await asyncio.gather(*[one(script) for script in scripts])


def lock_step(model: Qwen3ForCausalLM, scripts: list[Script]) -> None:
    """Turn by turn, all conversations in one padded batch, which takes as long as its longest turn."""
    histories = [list(script.prompt) for script in scripts]
    for turn in range(TURNS):
        longest = max(map(len, histories))
        ids = torch.tensor([[0] * (longest - len(history)) + history for history in histories], device=model.device)
        mask = torch.tensor([[0] * (longest - len(history)) + [1] * len(history) for history in histories]).to(ids)
        count = max(script.lengths[turn] for script in scripts)
        said = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=count, max_new_tokens=count
        )
        for history, script, row in zip(histories, scripts, said[:, longest:].tolist(), strict=True):
            history += [*row[: script.lengths[turn]], *script.bridges[turn]]


def measure(ways: dict[str, Callable[[list[Script]], None]], count: int, repeats: int, group: int) -> dict[str, float]:
    """The median of the sampled tokens per second of each way. The ways run alternately."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        scripts = make_scripts(count, repeat, group)
        tokens = sum(sum(script.lengths) for script in scripts)
        for name, way in ways.items():
            start = time.perf_counter()
            way(scripts)
            speeds[name].append(tokens / (time.perf_counter() - start))
    return {name: median(values) for name, values in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--conversations", type=int, nargs="+", default=[1, 8, 32, 128], help="numbers of concurrent conversations"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of each way; the median is reported")
    parser.add_argument(
        "--group", type=int, default=1, help="conversations that share a prompt, like the samples of a row"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads of each way; use more than the default only on an idle machine (0: torch's default)",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="0.9M")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = make_model(options.size, options.device)
    embedded, forgetful = (
        LocalEngine(model, threads=options.threads, memory_gb=16.0 if options.device != "cpu" else 2.0)
        for _ in range(2)
    )
    ways: dict[str, Callable[[list[Script]], None]] = {
        "embedded": lambda scripts: asyncio.run(converse(embedded, scripts, forget=False)),
        "re-prefilling": lambda scripts: asyncio.run(converse(forgetful, scripts, forget=True)),
        "lock-step": lambda scripts: lock_step(model, scripts),
    }
    table = Table(title=f"sampled tokens per second, {TURNS} turns, {torch.get_num_threads()} threads at most")
    for column in ("at once", *ways, "x re-prefilling", "x lock-step"):
        table.add_column(column, justify="right")
    measure(ways, 4, 1, options.group)  # warm-up
    speedup = None
    for count in options.conversations:
        speeds = measure(ways, count, options.repeats, options.group)
        ratios = [speeds["embedded"] / speeds[name] for name in ("re-prefilling", "lock-step")]
        table.add_row(
            str(count), *[f"{speed:,.0f}" for speed in speeds.values()], *[f"{ratio:.2f}" for ratio in ratios]
        )
        if count == 32 or speedup is None:
            speedup = ratios[1]
    Console(width=100).print(table)
    print(f"local_engine_speedup {speedup:.2f}")


if __name__ == "__main__":
    main()
