"""How much memory a training step needs, beside what `turnwise doctor` predicts.

    python benchmarks/memory.py                                  # both rows below at 0.5b; about 20 minutes on 2 idle cores
    python benchmarks/memory.py --size 135m --only lora
    python benchmarks/memory.py --size tiny --micro-batches 0    # all micro-batches of the step
    python benchmarks/memory.py --size 30m --ranks 2 --dtype float32    # of each of two ranks, predicted by `turnwise plan`

A training step on 32 conversations of 1,000 tokens (4 prompts of 200 tokens, 8 conversations each), with a random model of the
shape of Qwen2.5-0.5B (or SmolLM2-135M), in bfloat16: with a LoRA adapter of rank 16 on all linear layers, and with all
parameters, AdamW and float32 master weights. Each step runs in a process of its own, whose peak resident memory (`VmHWM`) is
printed. Before the step, the keys and values of all 32 conversations are in memory, and with autocast the engine's bfloat16 copy
of the weights. They are freed for the step, as the embedded engine frees them before an update.

The step is taken twice, because the optimizer's state exists from the end of the first step on. Memory does not depend on the
number of micro-batches: each frees its activations before the next begins. So the step is cut to the first two micro-batches
unless `--micro-batches 0` asks for all of them; the optimizer step follows in either case.

With `--ranks`, that many processes train by gloo (`cluster.launcher=torchrun`), each with two micro-batches. Rank 0 also has what
the embedded engine needs: a complete copy of the weights, which is updated after each optimizer step, and the KV cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONVERSATIONS, PROMPTS, PROMPT_TOKENS, TOKENS = 32, 4, 200, 1000
SHAPES = {
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "30m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PARAMETERS = {"float32": "float32", "bfloat16": "bfloat16", "autocast": "float32"}
"""The dtype of the parameters for each value of --dtype."""
LIMITS = {("0.5b", "lora"): 12.0, ("0.5b", "all"): 20.0}
"""GiB that the step must stay in."""


def options(size: str, kind: str, args: argparse.Namespace) -> dict[str, object]:
    """The recipe of a row of the table."""
    model: dict[str, object] = {"path": size, "dtype": PARAMETERS[args.dtype], "device": "cpu"}
    if args.dtype == "autocast":
        model["autocast"] = True
    if kind == "lora":
        model["lora"] = {"rank": 16}
    if args.gradient_checkpointing:
        model["gradient_checkpointing"] = True
    cluster: dict[str, object] = {"launcher": "local"}
    if args.ranks > 1:
        cluster = {"launcher": "torchrun", "fsdp": dict(part.split("=") for part in args.fsdp)}
    return {
        "cluster": cluster,
        "model": model,
        "data": {"train": "rows.jsonl"},
        "train": {
            "batch_size": PROMPTS,
            "group_size": CONVERSATIONS // PROMPTS,
            "micro_batch_tokens": args.micro_batch_tokens or None,
        },
        "limits": {"context": TOKENS},
    }


def measure(size: str, kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Peak resident memory in GiB, and the seconds of the step. Runs in a process of its own."""
    import torch
    from transformers import Qwen2ForCausalLM
    from transformers.initialization import no_init_weights

    from turnwise import assembly
    from turnwise.engines.local.engine import LARGE_CACHE
    from turnwise.models.cpu import with_fast_layers
    from turnwise.models.loading import adapt
    from turnwise.models.precision import Bfloat16Linears
    from turnwise.options.schema import Config
    from turnwise.training.local_learner import LocalLearner
    from turnwise.types import Sampling

    config = Config.model_validate(options(size, kind, args))
    shape = shape_of(size)
    mixed = config.model.autocast
    with no_init_weights():
        model = Qwen2ForCausalLM._from_config(shape, dtype=getattr(torch, config.model.dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    model.eval()
    kv = filled_cache(shape, config, model)
    adapt(model, assembly.model_source(config))
    with_fast_layers(model)
    engine_weights = Bfloat16Linears(model) if mixed else None
    learner = LocalLearner(
        model,
        sampling=Sampling(),
        optimizer=config.train,
        threads=torch.get_num_threads(),
        autocast=mixed,
    )
    if engine_weights is not None:
        engine_weights.free()
    if kv.bytes >= LARGE_CACHE:
        kv.resize(0, 0)
    seconds = take_steps(learner, config, shape.vocab_size, args)
    del engine_weights, kv  # until here, as those of the engine
    return {"gib": peak_gib(), "seconds": seconds}


def shape_of(size: str) -> Any:
    """The model's configuration."""
    from transformers import Qwen2Config

    return Qwen2Config(**SHAPES[size], max_position_embeddings=2048, tie_word_embeddings=True)


def filled_cache(shape: Any, config: Any, model: Any) -> Any:
    """A KV cache with all conversations, as the embedded engine keeps it."""
    import torch

    from turnwise.engines.local.cache import KVCache, KVShape
    from turnwise.engines.local.engine import DEFAULT_CACHE_GB

    heads, width = shape.num_key_value_heads, shape.hidden_size // shape.num_attention_heads
    kv = KVCache(
        [KVShape(2, heads, width)] * shape.num_hidden_layers,
        dtype=torch.bfloat16 if config.model.autocast else model.dtype,
        device=model.device,
        budget_bytes=int((config.engine.memory_gb or DEFAULT_CACHE_GB) * 2**30),
    )
    kv.resize(CONVERSATIONS, 1024)
    for tensor in kv.tensors:
        tensor.fill_(0.1)  # pages that nothing has written to are not resident
    return kv


def take_steps(
    learner: Any, config: Any, vocabulary: int, args: argparse.Namespace, after: Any = lambda: None
) -> float:
    """Take two steps; `after` is called after each. Returns the seconds."""
    import asyncio
    from dataclasses import replace

    from turnwise.training.batch import pack

    required = learner.requirements
    batch = pack(
        trajectories(vocabulary),
        micro_batch_tokens=config.train.micro_batch_tokens or required.micro_batch_tokens,
        parallel=required.parallel,
        share_prompts=required.share_prompts,
        kinds=required.logprob_kinds,
    )
    if args.micro_batches:
        batch = replace(batch, micro_batches=batch.micro_batches[: args.micro_batches * required.parallel])
    started = time.perf_counter()
    for _ in range(2):  # the optimizer's state exists from the end of the first step on
        asyncio.run(learner.update([batch], lr=1e-5))
        after()
    return time.perf_counter() - started


def rank(path: str, kind: str, args: argparse.Namespace) -> None:
    """The program of a rank: writes its peak into a file beside the model."""
    import torch

    from turnwise import assembly
    from turnwise.assembly.learners import rank_device
    from turnwise.options.schema import Config
    from turnwise.training.sharded.commands import follow
    from turnwise.training.sharded.ranks import Ranks

    torch.set_num_threads(1)
    config = Config.model_validate(options(path, kind, args))
    number, seconds = int(os.environ["RANK"]), 0.0
    if number:
        ranks = Ranks(config.cluster, device=rank_device(config))
        follow(ranks)
        ranks.close()
    else:
        learner = assembly.learner(config, path)
        model = assembly.sampled_model(config, learner, path)
        kv = filled_cache(model.config, config, model)
        seconds = take_steps(learner, config, model.config.vocab_size, args, after=lambda: learner.copy_weights(model))
        del kv
        learner.close()
    found = {"gib": peak_gib(), "seconds": seconds}
    Path(f"{path}.rank{number}").write_text(json.dumps(found))


def measure_ranks(kind: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """As `measure`, of each rank."""
    import torch
    from transformers import Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model"
        Qwen2ForCausalLM._from_config(
            shape_of(args.size), dtype=getattr(torch, PARAMETERS[args.dtype])
        ).save_pretrained(path)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        given = ["--size", args.size, "--dtype", args.dtype, "--micro-batches", str(args.micro_batches)]
        given += [
            "--micro-batch-tokens",
            str(args.micro_batch_tokens),
            "--ranks",
            str(args.ranks),
            "--fsdp",
            *args.fsdp,
        ]
        given += ["--gradient-checkpointing"] if args.gradient_checkpointing else []
        command = [sys.executable, *launcher, str(Path(__file__)), *given, "--child", kind, "--model", path]
        subprocess.run(command, check=True)
        return [json.loads(Path(f"{path}.rank{number}").read_text()) for number in range(args.ranks)]


def peak_gib() -> float:
    """Peak resident memory of this process in GiB.

    Not `ru_maxrss`: Linux hands that figure on to a child process, so a child of a large process (a test run) reports at least
    the size of its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise OSError("/proc/self/status has no VmHWM line: this benchmark runs on Linux only")


def trajectories(vocabulary: int) -> list:
    """Conversations of random tokens: a prompt, and one turn to the end, each with an advantage of its own."""
    import numpy as np

    from turnwise.types import Completion, LogprobKind, Row, Segment, Trajectory, Turn

    random = np.random.default_rng(0)
    prompts = random.integers(0, vocabulary, (PROMPTS, PROMPT_TOKENS)).tolist()
    found = []
    for number in range(CONVERSATIONS):
        group = number % PROMPTS
        one = Trajectory(id=str(number), group=str(group), row=Row(id=str(group), messages=[]), segments=[Segment()])
        ids = random.integers(0, vocabulary, TOKENS - PROMPT_TOKENS).tolist()
        said = Completion(
            token_ids=ids,
            logprobs=[-10.0] * len(ids),
            versions=[0] * len(ids),
            finish_reason="stop",
            logprob_kind=LogprobKind.SAMPLED,
        )
        one.segments[0].append_context(prompts[group])
        one.segments[0].append_completion(0, said)
        one.turns.append(Turn(index=0, message={}, text="", completion=said))
        one.advantages = [1.0 + number / 8]
        found.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--only", choices=("lora", "all"))
    parser.add_argument("--dtype", choices=list(PARAMETERS), default="bfloat16", help="autocast: model.autocast=true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=2, help="how many of the step's; 0: all")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="0: turnwise's default")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument(
        "--fsdp",
        nargs="*",
        default=[],
        metavar="OPTION=VALUE",
        help="options of cluster.fsdp, such as param_dtype=bfloat16",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        rank(args.model, args.child, args)
        return
    if args.child:
        print(json.dumps(measure(args.size, args.child, args)))
        return
    table = Table("trained", "predicted GiB", "measured GiB", "predicted / measured", "limit", "seconds")
    for kind in ("lora", "all"):
        if args.only in (None, kind):
            for cells in rows(kind, args):
                table.add_row(*cells)
    Console().print(table)


def rows(kind: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of a kind of training: one for each process."""
    from turnwise.doctor.memory import Workload, predict
    from turnwise.options.schema import Config
    from turnwise.planning.memory import rank_memory

    config = Config.model_validate(options(args.size, kind, args))
    shape = shape_of(args.size)
    workload = Workload(conversations=CONVERSATIONS, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS, equal=True)
    if args.ranks > 1:
        predicted = [rank_memory(config, shape, workload, args.ranks, rank=rank) for rank in range(args.ranks)]
        found = measure_ranks(kind, args)
    else:
        predicted = [predict(config, shape, workload)]
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--child", kind]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = [json.loads(output.strip().splitlines()[-1])]
    limit = LIMITS.get((args.size, kind)) if args.ranks == 1 else None
    for number, (expected, measured) in enumerate(zip(predicted, found, strict=True)):
        for part in expected.parts:
            print(
                f"  {kind:5} {f'rank {number}' if args.ranks > 1 else ''} {part.name:38} {part.bytes / 2**30:7.2f} GiB"
            )
        yield [
            ("LoRA, rank 16" if kind == "lora" else "all parameters") + (f", rank {number}" if args.ranks > 1 else ""),
            f"{expected.gib:.2f}",
            f"{measured['gib']:.2f}",
            f"{expected.gib / measured['gib']:.2f}",
            "" if limit is None else f"{limit:g}: {'kept' if measured['gib'] <= limit else 'NOT KEPT'}",
            f"{measured['seconds']:.0f}",
        ]


if __name__ == "__main__":
    main()
