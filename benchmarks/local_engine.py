"""Speed of the embedded engine, compared with two simple ways to sample conversations of several turns.

    python benchmarks/local_engine.py                    # about a minute on 2 cores
    python benchmarks/local_engine.py --conversations 32 --repeats 5 --group 8
    python benchmarks/local_engine.py --device cuda --size 0.5B --conversations 32 256
    python benchmarks/local_engine.py --model qwen3_5 granite_hybrid lfm2 --conversations 32
    python benchmarks/local_engine.py --policies 2 --conversations 32

Each conversation has a prompt of about 128 tokens and four turns. After each turn its environment adds 16 tokens. Turns have
different lengths, 32 tokens on average. All prompts are different; with `--group 8`, groups of 8 conversations have the same
prompt, as in training, which favours the embedded engine. The model is a Qwen3 of 0.92M parameters with random weights;
`--size 0.5B` uses the shape of Qwen2.5-0.5B, in bfloat16. The benchmark compares:

- embedded: `LocalEngine`, as turnwise uses it;
- re-prefilling: the same engine, but its cache is cleared after each turn, and no prefix is shared;
- lock-step: `model.generate` of transformers on a left-padded batch: all conversations wait for the longest turn, and each turn
  computes the complete history again. It computes no log-probabilities here, so it does less work than the other two.

Prints the sampled tokens per second (on a CPU per second of CPU time, so that other programs disturb less), and in the last line
`local_engine_speedup <embedded / lock-step at 32 conversations>`, the lowest of all models. With `--policies 2`, the
conversations are divided among two adapters of rank 16 on one base, and an engine that computes both in one batch is compared
with an engine for each; the last line is `local_engine_policies <one engine / an engine for each>`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    Lfm2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from turnwise.engines.local import LocalEngine
from turnwise.models.cpu import with_fast_layers
from turnwise.models.lora import add_adapter, with_second_adapter
from turnwise.options.algorithm import LoraSection
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
        "vocab_size": VOCABULARY,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
Sizes = dict[str, int]


def layers_of(sizes: Sizes, recurrent: str, attention: str) -> list[str]:
    """Three recurrent layers, then one that attends, and so on."""
    return ([recurrent] * 3 + [attention]) * (sizes["num_hidden_layers"] // 4)


def qwen3(sizes: Sizes, common: dict[str, Any]) -> PretrainedConfig:
    return Qwen3Config(**sizes, **common, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"])


def qwen3_5(sizes: Sizes, common: dict[str, Any]) -> PretrainedConfig:
    """A gated delta rule with as many heads as attention."""
    head_dim, heads = sizes["hidden_size"] // sizes["num_attention_heads"], sizes["num_attention_heads"]
    return Qwen3_5TextConfig(
        **sizes,
        **common,
        head_dim=head_dim,
        layer_types=layers_of(sizes, "linear_attention", "full_attention"),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
    )


def granite_hybrid(sizes: Sizes, common: dict[str, Any]) -> PretrainedConfig:
    """Mamba 2, without experts as in Granite 4 H micro."""
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    kinds: Any = {"layers_block_type": layers_of(sizes, "mamba", "attention")}  # a name that the config translates
    return GraniteMoeHybridConfig(
        **sizes,
        **common,
        **kinds,
        num_local_experts=0,
        shared_intermediate_size=sizes["intermediate_size"],
        mamba_n_heads=2 * sizes["num_attention_heads"],
        mamba_d_head=head_dim,
        mamba_d_state=head_dim,
    )


def lfm2(sizes: Sizes, common: dict[str, Any]) -> PretrainedConfig:
    """Short convolutions."""
    return Lfm2Config(
        **sizes, **common, layer_types=layers_of(sizes, "conv", "full_attention"), block_auto_adjust_ff_dim=False
    )


MODELS = {make.__name__: make for make in (qwen3, qwen3_5, granite_hybrid, lfm2)}


def make_model(name: str, size: str, device: str) -> PreTrainedModel:
    """Random weights, the same in each call; large ones in bfloat16."""
    torch.manual_seed(0)
    common = {
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(MODELS[name](SIZES[size], common), dtype=torch.float32).eval()
    return (model if size == "0.9M" else model.to(torch.bfloat16)).to(device)


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


def lock_step(model: PreTrainedModel, scripts: list[Script]) -> None:
    """Turn by turn, all conversations in one padded batch, which takes as long as its longest turn."""
    histories = [list(script.prompt) for script in scripts]
    for turn in range(TURNS):
        longest = max(map(len, histories))
        ids = torch.tensor([[0] * (longest - len(history)) + history for history in histories], device=model.device)
        mask = torch.tensor([[0] * (longest - len(history)) + [1] * len(history) for history in histories]).to(ids)
        count = max(script.lengths[turn] for script in scripts)
        said: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=count, max_new_tokens=count
        )
        for history, script, row in zip(histories, scripts, said[:, longest:].tolist(), strict=True):
            history += [*row[: script.lengths[turn]], *script.bridges[turn]]


Clock = Callable[[], float]


def measure(
    ways: dict[str, Callable[[list[Script]], None]], count: int, repeats: int, group: int, clock: Clock
) -> dict[str, float]:
    """The median of the sampled tokens per second of each way. The ways run alternately."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        scripts = make_scripts(count, repeat, group)
        tokens = sum(sum(script.lengths) for script in scripts)
        for name, way in ways.items():
            start = clock()
            way(scripts)
            speeds[name].append(tokens / (clock() - start))
    return {name: median(values) for name, values in speeds.items()}


def measure_model(name: str, table: Table, options: argparse.Namespace) -> float:
    """Add the rows of one model to the table. Returns embedded / lock-step at 32 conversations, or at the first number."""
    model = make_model(name, options.size, options.device)
    loaded = with_fast_layers(make_model(name, options.size, options.device))  # as turnwise loads a model
    embedded, forgetful = (
        LocalEngine(loaded, threads=options.threads, memory_gb=16.0 if options.device != "cpu" else 2.0)
        for _ in range(2)
    )
    ways: dict[str, Callable[[list[Script]], None]] = {
        "embedded": lambda scripts: asyncio.run(converse(embedded, scripts, forget=False)),
        "re-prefilling": lambda scripts: asyncio.run(converse(forgetful, scripts, forget=True)),
        "lock-step": lambda scripts: lock_step(model, scripts),
    }
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    measure(ways, 4, 1, options.group, clock)  # warm-up
    speedup = None
    for count in options.conversations:
        speeds = measure(ways, count, options.repeats, options.group, clock)
        ratios = [speeds["embedded"] / speeds[name] for name in ("re-prefilling", "lock-step")]
        table.add_row(
            name, str(count), *[f"{speed:,.0f}" for speed in speeds.values()], *[f"{ratio:.2f}" for ratio in ratios]
        )
        if count == 32 or speedup is None:
            speedup = ratios[1]
    assert speedup is not None
    return speedup


def measure_policies(name: str, table: Table, options: argparse.Namespace) -> float:
    """Add the rows of one model to the table. Returns the speed of one engine for all adapters, compared with an engine for each,
    at the last number of conversations."""
    base = with_fast_layers(make_model(name, options.size, options.device))
    add_adapter(base, LoraSection(rank=16))
    models = [base, *(with_second_adapter(base, LoraSection(rank=16)) for _ in range(options.policies - 1))]
    first = LocalEngine(base, threads=options.threads)
    joined = [first, *(first.with_model(model, 0) for model in models[1:])]
    apart = [LocalEngine(model, threads=options.threads) for model in models]

    async def play(engines: Sequence[Any], scripts: list[Script]) -> None:
        parts = [
            converse(engine, scripts[number :: len(engines)], forget=False) for number, engine in enumerate(engines)
        ]
        await asyncio.gather(*parts)

    ways: dict[str, Callable[[list[Script]], None]] = {
        "one engine": lambda scripts: asyncio.run(play(joined, scripts)),
        "an engine for each": lambda scripts: asyncio.run(play(apart, scripts)),
        "one policy": lambda scripts: asyncio.run(play(apart[:1], scripts)),
    }
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    measure(ways, 4, 1, options.group, clock)  # warm-up
    ratio = 0.0
    for count in options.conversations:
        speeds = measure(ways, count, options.repeats, options.group, clock)
        ratio = speeds["one engine"] / speeds["an engine for each"]
        table.add_row(name, str(count), *[f"{speed:,.0f}" for speed in speeds.values()], f"{ratio:.2f}")
    return ratio


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
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["qwen3"])
    parser.add_argument(
        "--policies", type=int, help="compare this number of adapters in one engine with an engine for each"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.policies:
        table = Table(title=f"sampled tokens per second, {TURNS} turns, {options.policies} policies")
        for column in ("model", "at once", "one engine", "an engine for each", "one policy", "x an engine for each"):
            table.add_column(column, justify="right")
        ratios = [measure_policies(name, table, options) for name in options.model]
        Console(width=100).print(table)
        print(f"local_engine_policies {min(ratios):.2f}")
        return
    table = Table(title=f"sampled tokens per second, {TURNS} turns, {torch.get_num_threads()} threads at most")
    for column in ("model", "at once", "embedded", "re-prefilling", "lock-step", "x re-prefilling", "x lock-step"):
        table.add_column(column, justify="right")
    speedups = [measure_model(name, table, options) for name in options.model]
    Console(width=100).print(table)
    print(f"local_engine_speedup {min(speedups):.2f}")


if __name__ == "__main__":
    main()
