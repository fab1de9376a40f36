"""Engines side by side: `python benchmarks/engines.py --part f --size 1m`. Each part takes at most ten minutes on two idle cores.

    --part c    overhead of turnwise's client: tokens per second through `Engine.generate`, and of the engine without it
    --part d    prefix-cache hits of conversations of ten turns, compared with all tokens that the engine has already seen
    --part e    seconds and bytes of a weight update, compared with a copy of the weights in memory
    --part f    tokens per second of local, vllm, sglang and transformers' `generate` at 1, 8, 32 and 128 conversations

The models have random weights, and the shapes of `--size`. All requests sample 64 tokens (`--tokens`) after prompts of 128 random
tokens, and no two prompts share a prefix. Log-probabilities are reported by all engines, but not by `generate`. vLLM and SGLang
must be installed in `$TURNWISE_ENGINES/vllm` and `$TURNWISE_ENGINES/sglang` (default `~/.cache/turnwise/engines`;
`make test-engines` does it); engines that are missing are left out.

What "without the client" means in part c: for vLLM and SGLang, the same requests as plain HTTP requests of aiohttp, not streamed.
For the embedded engine, its steps in a loop without asyncio. The two ways alternate. "By CPU time" compares the CPU seconds of
this process and the server together: other processes affect it less than the throughput.

Part d compares with two limits. "Seen before" are all tokens of a prompt that the engine has computed in an earlier turn: the
earlier prompt and all sampled tokens but the last, whose keys and values no engine has computed. vLLM reuses complete blocks of
its cache only (32 tokens, the smallest size on a CPU), so "reusable" is the part of these tokens that lies in complete blocks.

In part f, each other engine alternates with the embedded engine, measurement by measurement. In parts c and f, the fastest of
the repeats counts: other processes disturb it least. While the embedded engine runs in part f, the other engine's server is
stopped (SIGSTOP). `--threads` holds for all engines; SGLang always runs with one thread on a CPU.

Prints a table for each part. The last line is `engines_<part> <figure>`: the smallest throughput of the client relative to that
of the engine at 32 conversations (c), the smallest share of the reusable tokens (d), the largest number of memory copies that
take as long as an update (e), and the embedded engine's throughput divided by that of the fastest other engine at 32
conversations (f).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise import assembly
from turnwise.engines.engine import Engine, closing
from turnwise.engines.local import LocalEngine
from turnwise.errors import TurnwiseError
from turnwise.models.loading import published_weights
from turnwise.options.schema import Config
from turnwise.types import Completion, Request, Sampling

HERE = Path(__file__).resolve().parent
PEERS, TOKENIZER = HERE / ".peers", HERE.parent / "demo" / "model"
ENGINES = ("local", "generate", "vllm", "sglang")
CONVERSATIONS = {"c": (1, 32, 128), "d": (8,), "f": (1, 8, 32, 128)}
PROMPT, CONTEXT, TURNS, REPLY = 128, 1024, 10, 24
BLOCK = {"local": 1, "vllm": 32, "sglang": 1}
"""Tokens of a block: the cache of an engine reuses complete blocks only."""
SIZES = {
    "1m": (1024, 128, 384, 4, 4, 2),
    "30m": (8192, 512, 1408, 8, 8, 4),
    "135m": (49152, 576, 1536, 30, 9, 3),
}
"""Vocabulary, hidden size, width of the feed-forward layers, layers, heads, key-value heads."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine that is measured."""

    name: str
    engine: Engine
    model: LlamaForCausalLM
    """The model in this process: that of the trainer, and of the embedded engine."""


def model_folder(size: str) -> Path:
    """The directory of the model of a size, which is created if it does not exist."""
    vocabulary, hidden, width, layers, heads, kv_heads = SIZES[size]
    folder = PEERS / f"engines-{size}"
    if not (folder / "model.safetensors").exists():
        from transformers import AutoTokenizer

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def engines_folder() -> Path:
    """The directory with an environment for each engine."""
    return Path(os.environ.get("TURNWISE_ENGINES", "~/.cache/turnwise/engines")).expanduser()


def recipe(name: str, options: argparse.Namespace) -> Config:
    """The recipe of an engine."""
    engine: dict[str, Any] = {"name": name}
    if name == "local":
        engine |= {"memory_gb": 4.0, "threads": options.threads}
    else:
        engine |= {
            "python": str(engines_folder() / name / "bin" / "python"),
            "memory_gb": 2.0 if options.size == "135m" else 1.0,
        }
    return Config.model_validate(
        {
            "model": {"path": str(model_folder(options.size)), "dtype": options.dtype, "device": "cpu"},
            "data": {"train": "rows.jsonl"},
            "limits": {"context": CONTEXT},
            "max_concurrent": 128,
            "engine": engine,
        }
    )


async def with_engine(
    name: str, options: argparse.Namespace, measure: Callable[[Subject], Awaitable[Any]]
) -> Any | None:
    """Start an engine, measure, and stop it. None, with a message, if it is not installed or cannot be started."""
    from turnwise.models.loading import load_model

    if name != "local" and not (engines_folder() / name / "bin" / "python").exists():
        print(f"{name} is left out: it is not installed in {engines_folder() / name}", flush=True)
        return None
    try:
        config = recipe(name, options)
        model = load_model(assembly.model_source(config))
        engine = assembly.engine(config, assembly.renderer(config), model)
        async with closing(engine):
            started = time.perf_counter()
            await engine.start()
            print(f"{name} is ready after {time.perf_counter() - started:.0f} s", flush=True)
            await ask(engine, requests(options, 2, seed=99))  # warm-up
            return await measure(Subject(name, engine, model))
    except TurnwiseError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None


def requests(options: argparse.Namespace, count: int, *, seed: int) -> list[Request]:
    """Requests with prompts of random tokens."""
    draw = np.random.default_rng(seed)
    return [
        Request(
            conversation=f"{seed}/{number}",
            token_ids=draw.integers(3, 1000, PROMPT).tolist(),
            sampling=Sampling(max_tokens=options.tokens),
            seed=number,
        )
        for number in range(count)
    ]


async def ask(engine: Engine, batch: Sequence[Request]) -> list[Completion]:
    """All requests at the same time."""
    completions = await asyncio.gather(*[engine.generate(request) for request in batch])
    for request, completion in zip(batch, completions, strict=True):
        assert len(completion.token_ids) == request.sampling.max_tokens, "random weights do not stop"
        engine.release(request.conversation)
    return completions


async def pair(
    options: argparse.Namespace,
    count: int,
    first: Callable[[Sequence[Request]], Awaitable[Any]],
    second: Callable[[Sequence[Request]], Awaitable[Any]],
    *,
    seed: int,
    cpu: Callable[[], float] = time.process_time,
) -> tuple[float, float, float]:
    """Sampled tokens per second of two ways to serve a batch. The ways alternate, and the fastest repeat of each counts: other
    processes disturb it least.

    The third figure is the smallest CPU time of the second way, divided by that of the first.
    """
    speeds: tuple[list[float], list[float]] = ([], [])
    used: tuple[list[float], list[float]] = ([], [])
    for repeat in range(options.repeats):
        for way, work in enumerate((first, second)):
            batch = requests(options, count, seed=100_000 * (way + 1) + seed + repeat)
            started, before = time.perf_counter(), cpu()
            await work(batch)
            speeds[way].append(count * options.tokens / (time.perf_counter() - started))
            used[way].append(cpu() - before)
    return max(speeds[0]), max(speeds[1]), min(used[1]) / min(used[0])


def cpu_seconds(engine: Engine) -> float:
    """CPU time of this process and of the engine's server."""
    seconds = time.process_time()
    if isinstance(engine, LocalEngine):
        return seconds
    group = engine._replicas.all[0].process.pid  # type: ignore[attr-defined]
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[2]) == group:
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


# part f: throughput


def generate(model: LlamaForCausalLM, batch: Sequence[Request]) -> None:
    """transformers' own generation, on one batch; the prompts have the same length, so nothing is padded."""
    ids, count = torch.tensor([request.token_ids for request in batch]), batch[0].sampling.max_tokens
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=count,
        max_new_tokens=count,
    )


@contextlib.contextmanager
def stopped(server: Engine | None) -> Iterator[None]:
    """A context in which an engine's server does not run: idle servers of vLLM and SGLang poll, and take a core."""
    if server is None:
        yield
        return
    group = server._replicas.all[0].process.pid  # type: ignore[attr-defined]
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


async def throughput(options: argparse.Namespace, console: Console) -> float:
    """Part f: each engine alternately with the embedded engine."""
    counts = options.conversations or CONVERSATIONS["f"]
    rows: dict[str, list[tuple[float, float, float]]] = {}

    async def beside_local(
        name: str, work: Callable[[Sequence[Request]], Awaitable[Any]], server: Engine | None = None
    ) -> None:
        async def of_local(subject: Subject) -> None:
            async def ask_local(batch: Sequence[Request]) -> None:
                with stopped(server):
                    await ask(subject.engine, batch)

            rows[name] = [await pair(options, count, work, ask_local, seed=1000 * count) for count in counts]

        await with_engine("local", options, of_local)

    for name in options.engines:
        if name == "generate":
            from turnwise.models.loading import load_model

            model = load_model(assembly.model_source(recipe("local", options)))

            async def run(batch: Sequence[Request], model: LlamaForCausalLM = model) -> None:
                generate(model, batch)

            await run(requests(options, 2, seed=99))
            await beside_local(name, run)
        elif name != "local":
            await with_engine(
                name,
                options,
                lambda subject: beside_local(
                    subject.name, lambda batch: ask(subject.engine, batch), server=subject.engine
                ),
            )
    table = Table("engine", *(f"{count} conversations" for count in counts))
    for name, speeds in rows.items():
        table.add_row(f"local, beside {name}", *(f"{local:,.0f}" for _, local, _ in speeds))
        table.add_row(name, *(f"{other:,.0f} (local: {local / other:.2f} times)" for other, local, _ in speeds))
    console.print(table)
    console.print(f"sampled tokens per second, {options.size}, {options.dtype}, threads: {options.threads}")
    place = list(counts).index(32) if 32 in counts else 0
    return min((speeds[place][1] / speeds[place][0] for speeds in rows.values()), default=float("nan"))


# part c: the overhead of the client


async def plain(subject: Subject, batch: Sequence[Request]) -> None:
    """The requests of a batch without turnwise's client."""
    if isinstance(subject.engine, LocalEngine):
        _steps(subject.engine, batch)
        return
    import aiohttp

    server = subject.engine._replicas.all[0].server  # type: ignore[attr-defined]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, headers=server._headers, connector=connector) as session:

        async def post(request: Request) -> None:
            path, body = _plain_request(subject.name, request)
            async with session.post(path, json=body) as response:
                answer = json.loads(await response.read())
                assert response.status == 200, answer

        await asyncio.gather(*[post(request) for request in batch])


def _steps(engine: LocalEngine, batch: Sequence[Request]) -> None:
    """The steps of the embedded engine in a loop."""
    core = engine._core
    pending = [engine._prepare(request) for request in batch]
    for request in pending:
        core.add(request)
    while core.batch.requests or core.scheduler.waiting:
        core.step()
    for request in batch:
        engine.release(request.conversation)


def _plain_request(name: str, request: Request) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask a server for the same completion, in one answer."""
    if name == "vllm":
        from turnwise.engines.vllm.api import MODEL, sampling_params

        sampling = sampling_params(request.sampling, request.seed)
        return "/inference/v1/generate", {
            "model": MODEL,
            "token_ids": list(request.token_ids),
            "sampling_params": sampling,
        }
    sampling = {"max_new_tokens": request.sampling.max_tokens, "temperature": 1.0, "ignore_eos": True}
    return "/generate", {
        "input_ids": list(request.token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }


async def overhead(options: argparse.Namespace, console: Console) -> float:
    """Part c: the engine through the client and without it, alternately."""
    counts = options.conversations or CONVERSATIONS["c"]
    table = Table("engine", "conversations", "client, tokens/s", "without, tokens/s", "client / without", "by CPU time")
    at_32: list[float] = []

    async def of_engine(subject: Subject) -> None:
        for count in counts:
            ways = (lambda batch: ask(subject.engine, batch), lambda batch: plain(subject, batch))
            through, without, by_cpu = await pair(
                options, count, *ways, seed=1000 * count, cpu=lambda: cpu_seconds(subject.engine)
            )
            ratio = through / without
            table.add_row(
                subject.name, str(count), f"{through:,.0f}", f"{without:,.0f}", f"{ratio:.2f}", f"{by_cpu:.2f}"
            )
            if count == 32:
                at_32.append(ratio)

    for name in options.engines:
        if name != "generate":
            await with_engine(name, options, of_engine)
    console.print(table)
    return min(at_32, default=float("nan"))


# part d: prefix-cache hits


async def prefix_hits(options: argparse.Namespace, console: Console) -> float:
    """Part d: in each turn after the first, the tokens from the cache, compared with those that could be in it."""
    count = (options.conversations or CONVERSATIONS["d"])[0]
    table = Table("engine", "prompt tokens", "seen before", "reusable", "from the cache", "of seen", "of reusable")
    shares: list[float] = []

    async def of_engine(subject: Subject) -> None:
        async def converse(request: Request) -> tuple[int, int, int, int]:
            history, draw = list(request.token_ids), np.random.default_rng(request.seed)
            prompts = seen = reusable = cached = 0
            block = BLOCK[subject.name]
            for turn in range(TURNS):
                sampling = Sampling(max_tokens=32)
                completion = await subject.engine.generate(
                    Request(conversation=request.conversation, token_ids=list(history), sampling=sampling, seed=turn)
                )
                if turn:
                    known = len(history) - REPLY - 1  # without the last sampled token
                    prompts, seen, reusable = prompts + len(history), seen + known, reusable + known // block * block
                    cached += completion.cached_tokens or 0
                history += [*completion.token_ids, *draw.integers(3, 1000, REPLY).tolist()]
            subject.engine.release(request.conversation)
            return prompts, seen, reusable, cached

        batch = requests(options, count, seed=7)
        totals = np.sum(await asyncio.gather(*[converse(request) for request in batch]), axis=0).tolist()
        shares.append(totals[3] / totals[2])
        table.add_row(
            subject.name, *(f"{total:,}" for total in totals), f"{totals[3] / totals[1]:.1%}", f"{shares[-1]:.1%}"
        )

    for name in options.engines:
        if name != "generate":
            await with_engine(name, options, of_engine)
    console.print(table)
    return min(shares, default=float("nan"))


# part e: weight updates


async def weight_update(options: argparse.Namespace, console: Console) -> float:
    """Part e: the median of several updates, each beside a copy of the same tensors in memory."""
    table = Table("engine", "MiB", "update, s", "copy in memory, s", "update / copy")
    ratios: list[float] = []

    async def of_engine(subject: Subject) -> None:
        state = published_weights(subject.model)
        tensors = {tensor.data_ptr(): tensor for tensor in state.values()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        shared = isinstance(subject.engine, LocalEngine)  # samples on the trainer's parameters
        updates: list[float] = []
        copies: list[float] = []
        for version in range(1, options.repeats + 3):
            started = time.perf_counter()
            await subject.engine.load_weights(version, None if shared else state)
            updates.append(time.perf_counter() - started)
            started = time.perf_counter()
            copied = [tensor.clone() for tensor in tensors.values()]
            copies.append(time.perf_counter() - started)
            del copied
        update, copy = median(updates), median(copies)
        ratios.append(update / copy)
        moved = "0 (shared)" if shared else f"{size / 2**20:,.1f}"
        table.add_row(subject.name, moved, f"{update:.4f}", f"{copy:.4f}", f"{ratios[-1]:.2f}")

    for name in options.engines:
        if name != "generate":
            await with_engine(name, options, of_engine)
    console.print(table)
    return max(ratios, default=float("nan"))


PARTS = {"c": overhead, "d": prefix_hits, "e": weight_update, "f": throughput}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), default="f")
    parser.add_argument("--size", choices=list(SIZES), default="1m", help="parameters of the model")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--conversations", type=int, nargs="+", help="numbers of concurrent conversations")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens of each request")
    parser.add_argument("--repeats", type=int, help="runs of each measurement: 3; 1 for part f with --size 135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads of an engine")
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = 1 if options.size == "135m" and options.part == "f" else 3
    torch.set_num_threads(options.threads)
    # vLLM's server inherits these: its threads may run on all cores
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    figure = asyncio.run(PARTS[options.part](options, Console(width=110)))
    print(f"engines_{options.part} {figure:.3f}")


if __name__ == "__main__":
    main()
