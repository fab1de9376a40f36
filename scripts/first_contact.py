"""The first ten minutes on a machine with a GPU: what is true there of what was predicted without one. Needs no network.

python scripts/first_contact.py                        # all sections, on cuda; results in build/first_contact/
python scripts/first_contact.py --only probes,trainer
python scripts/first_contact.py --small --device cpu   # every section with a tiny model, to try this script

Each section writes one line of JSON to first_contact.jsonl at once: nothing is lost if a later one hangs. REAL_MODELS may name
model directories, separated by blanks, for the section `probes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support.tiny import save_model, save_rows  # noqa: E402
from training.test_batch import trajectory  # noqa: E402
from turnwise.engines.local import LocalEngine  # noqa: E402
from turnwise.engines.local.forward import GenericForward, logit_difference  # noqa: E402
from turnwise.engines.local.fused import FusedForward  # noqa: E402
from turnwise.engines.local.scheduler import SamplingTensors, sample_tokens  # noqa: E402
from turnwise.engines.remote.weights import WeightFiles  # noqa: E402
from turnwise.engines.vllm import worker  # noqa: E402
from turnwise.models.loading import ModelSource, load_model, published_weights  # noqa: E402
from turnwise.training import forward as forward_module  # noqa: E402
from turnwise.training.batch import pack  # noqa: E402
from turnwise.training.local_learner import LocalLearner  # noqa: E402
from turnwise.types import Request, Sampling, Trajectory  # noqa: E402

SIZES = {"tiny": (64, 192, 4, 4, 2, 16, 512), "0.6B": (1024, 3072, 28, 16, 8, 128, 151936)}
"""Hidden size, inner size, layers, heads, heads of keys, their size, vocabulary."""
PEAK_FLOPS = 989e12
"""A H100 in bfloat16, for the share of it that is used."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the sections run, and how large they are."""

    device: torch.device
    small: bool
    out: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object], times: int = 10, before: int = 3) -> float:
        """The time of one call."""
        for _ in range(before):
            work()
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - start) / times * 1e3

    def model_path(self) -> Path:
        """A model with random weights in bfloat16."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        name = "tiny" if self.small else "0.6B"
        hidden, inner, layers, heads, key_heads, head, vocabulary = SIZES[name]
        path = self.out / f"model-{name}"
        if not path.is_dir():
            config = Qwen3Config(
                **{"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": head},
                **{"num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocabulary},
                **{"max_position_embeddings": 40960, "tie_word_embeddings": True},
            )
            torch.manual_seed(0)
            Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        return path

    def model(self, dtype: str = "bfloat16", path: Path | None = None, kernels: Any = "auto") -> Any:
        """The loaded model, on the device."""
        source = {
            "path": str(path or self.model_path()),
            "dtype": dtype,
            "device": str(self.device),
            "kernels": kernels,
        }
        return load_model(ModelSource.model_validate(source))

    def profiled(self, name: str, work: Callable[[], object]) -> None:
        """Write the table of the profiler to a file."""
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if self.on_gpu else [])]
        with torch.profiler.profile(activities=kinds) as found:
            work()
            self.wait()
        by = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        (self.out / f"{name}.txt").write_text(found.key_averages().table(sort_by=by, row_limit=40))


Facts = dict[str, Any]


def machine(at: Place) -> Facts:
    """What the machine is and how fast its parts are."""
    facts: Facts = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if at.on_gpu:
        facts |= {"gpu": torch.cuda.get_device_name(), "memory": torch.cuda.mem_get_info(), "cpus": os.cpu_count()}
        facts |= {"cudnn": torch.backends.cudnn.version(), "nccl": torch.cuda.nccl.version()}
        facts |= {"fp32 precision": torch.backends.cuda.matmul.fp32_precision}
    values, few, size = torch.zeros(16, device=at.device), torch.zeros(8), 256 if at.small else 8192
    facts["us per launch"] = at.milliseconds(lambda: values.add_(1), 2000) * 1e3
    facts["us per .item()"] = at.milliseconds(lambda: values[0].item(), 300) * 1e3
    facts["us per small copy to the device"] = at.milliseconds(lambda: few.to(at.device), 300) * 1e3
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(size, size, device=at.device, dtype=dtype)
        facts[f"TFLOPS {dtype}"] = 2 * size**3 / at.milliseconds(lambda m=matrix: m @ m, 5) / 1e9
    large = torch.zeros(1 << (20 if at.small else 29), dtype=torch.uint8)
    facts["GB/s to the device"] = large.numel() / at.milliseconds(lambda: large.to(at.device), 3, 1) / 1e6
    there = large.to(at.device)
    facts["GB/s to the host"] = large.numel() / at.milliseconds(lambda: there.cpu(), 3, 1) / 1e6
    return facts


def probes(at: Place) -> Facts:
    """Whether prefix trees and the fused pass stay on, and how far their logits are from the limit."""
    facts: Facts = {}
    for path in [at.model_path(), *map(Path, os.environ.get("REAL_MODELS", "").split())]:
        for dtype in ("bfloat16", "float32"):
            model, name = at.model(dtype, path), f"{path.name} {dtype}"
            for kind in (FusedForward, GenericForward):
                facts[f"{name} {kind.__name__}: difference, limit"] = logit_difference(kind(model), model)
            facts[f"{name} shares prompts"] = forward_module.try_tree_attention(model)
            facts[f"{name} would by its own logits"] = forward_module._with_tree(at.model(dtype, path), gradients=False)
    return facts


def attention(at: Place) -> Facts:
    """The kernel of each kind of attention call, and the cost of new shapes in this and in a new thread."""
    heads, key_heads, head = 16, 8, 128
    rows, length, keys = (2, 16, 24) if at.small else (8, 1024, 1536)
    kernels, facts = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}, dict[str, Any]()

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=at.device, dtype=dtype)

    summand = torch.zeros(rows, 1, length, keys, device=at.device, dtype=torch.bfloat16)
    full, grouped = drawn(rows, heads, keys, head), drawn(rows, key_heads, keys, head)
    cases: dict[str, tuple[torch.Tensor, torch.Tensor, Facts]] = {
        "root": (full, grouped, {"is_causal": True, "enable_gqa": True}),
        "root in float32": (full.float(), grouped.float(), {"is_causal": True, "enable_gqa": True}),
        "tree": (drawn(rows, heads, length, head), full, {"attn_mask": summand}),
        "tree, grouped heads": (drawn(rows, heads, length, head), grouped, {"attn_mask": summand, "enable_gqa": True}),
    }
    for name, (query, key, options) in cases.items():
        facts[f"{name}: kernel"] = kernels.get(torch._fused_sdp_choice(query, key, key, **options))
        facts[f"{name}: ms"] = at.milliseconds(
            lambda q=query, k=key, o=options: F.scaled_dot_product_attention(q, k, k, **o)
        )

    def new_shapes() -> list[float]:
        found = []
        for number in range(8):
            count = (40 if at.small else 700) + 7 * number
            query, key = drawn(1, heads, count, head), drawn(1, key_heads, count, head)
            call = lambda q=query, k=key: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)  # noqa: E731
            found.append(round(at.milliseconds(call, 1, 0), 2))
        return found

    facts["ms of 8 new shapes"], facts["ms again"] = new_shapes(), new_shapes()
    in_thread: list[float] = []
    thread = threading.Thread(target=lambda: in_thread.extend(new_shapes()))
    thread.start()
    thread.join()
    facts["ms again, in a new thread"] = in_thread
    return facts


def sampler(at: Place) -> Facts:
    """Tokens of probability 0: cumulative sums on a GPU need not ascend, and one row has another kernel than several."""
    vocabulary, draws, impossible = 2000 if at.small else 151936, 0, 0
    generator = torch.Generator().manual_seed(0)
    for number in range(4 if at.small else 400):
        rows = 1 if number % 2 else 64
        options = SamplingTensors.of([Sampling(top_p=0.9, top_k=50)] * rows, at.device)
        logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(at.device)
        sampled = sample_tokens(logits, options, np.random.default_rng(number).random(rows, dtype=np.float32))
        impossible += int((~np.isfinite(sampled.logprobs_B)).sum())
        draws += rows
    return {"draws": draws, "tokens of probability 0": impossible}


def tests(at: Place) -> Facts:
    """tests/test_cuda.py, and training on the device that is not there, for comparison."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_cuda.py", "-p", "no:cacheprovider", "-rfs"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    return {"status": result.returncode, "end": result.stdout[-1500:]}


def workload(kind: str, vocabulary: int, shorter: int) -> list[Trajectory]:
    """Conversations: groups with a common prompt, single ones, or groups with several turns. Lengths are divided by `shorter`."""
    draw = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return draw.integers(3, vocabulary, max(2, count // shorter)).tolist()

    match kind:
        case "group":
            prompt = ids(512)
            rows = [[("context", prompt), ("turn", ids(1000))] for _ in range(32)]
        case "alone":
            rows = [[("context", ids(512)), ("turn", ids(1536))] for _ in range(16)]
        case _:
            prompts = [ids(1000) for _ in range(4)]
            rows = [
                [("context", prompts[n // 4]), ("turn", ids(400)), ("context", ids(100)), ("turn", ids(800))]
                for n in range(16)
            ]
    return [
        trajectory(
            f"t{n}", parts, [1.0 if n % 2 else -1.0] * sum(part == "turn" for part, _ in parts), group=f"g{n // 4}"
        )
        for n, parts in enumerate(rows)
    ]


def trainer(at: Place) -> Facts:
    """Seconds of an update, the share of the device's speed, and the peak of its memory."""
    facts: Facts = {}
    for name, dtype, autocast, kernels in (
        ("bf16", "bfloat16", False, "auto"),
        ("bf16, kernels=none", "bfloat16", False, "none"),
        ("autocast", "float32", True, "auto"),
        ("fp32", "float32", False, "auto"),
    ):
        for kind in ("group", "alone", "turns") if name == "bf16" else ("alone",):
            learner = LocalLearner(at.model(dtype, kernels=kernels), sampling=Sampling(), autocast=autocast)
            needed, model = learner.requirements, learner.model
            batch = pack(
                workload(kind, model.config.vocab_size, 16 if at.small else 1),
                micro_batch_tokens=needed.micro_batch_tokens,
                share_prompts=needed.share_prompts,
            )
            if at.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            update = lambda one=learner, of=batch: asyncio.run(one.update([of], lr=1e-6))  # noqa: E731
            seconds = [at.milliseconds(update, 1, 0) / 1e3 for _ in range(3)]
            tokens = sum(micro.token_ids_BL.numel() for micro in batch.micro_batches)
            targets = sum(len(micro.token_U) for micro in batch.micro_batches)
            head = model.get_input_embeddings().weight.numel()
            body = sum(parameter.numel() for parameter in model.parameters()) - head
            facts[f"{name} {kind}"] = {
                "seconds": [round(one, 3) for one in seconds],
                "shares prompts": needed.share_prompts,
                "tokens": tokens,
                "share of a H100, without attention": 6 * (body * tokens + head * targets) / seconds[-1] / PEAK_FLOPS,
                "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if at.on_gpu else None,
            }
            if name == "bf16":
                at.profiled(f"train-{kind}", update)
    return facts


def engine(at: Place) -> Facts:
    """Milliseconds of a decode step, by the number of conversations."""
    model, facts = at.model(), dict[str, Any]()
    for rows in (2, 4) if at.small else (1, 16, 64, 256):
        made = LocalEngine(model, memory_gb=1 if at.small else 30)

        async def sample(count: int, seed: int, made: LocalEngine = made, rows: int = rows) -> None:
            draw = np.random.default_rng(seed)
            prompts = [draw.integers(3, model.config.vocab_size, 100 + n % 32).tolist() for n in range(rows)]
            requests = [
                Request(conversation=f"{seed}-{n}", token_ids=ids, sampling=Sampling(max_tokens=count), seed=n)
                for n, ids in enumerate(prompts)
            ]
            await asyncio.gather(*map(made.generate, requests))

        asyncio.run(sample(4, 0))
        steps, start, count = made.stats.decode_steps, time.perf_counter(), 8 if at.small else 128
        asyncio.run(sample(count, 1))
        at.wait()
        seconds = time.perf_counter() - start
        facts[f"{rows} rows"] = {
            "ms per step": seconds / (made.stats.decode_steps - steps) * 1e3,
            "tokens/s": rows * count / seconds,
        }
        at.profiled(f"decode-{rows}", lambda run=sample: asyncio.run(run(8, 2)))
        asyncio.run(made.close())
    return facts


def ranks(at: Place) -> Facts:
    """FSDP2 on one rank, with NCCL on a GPU: a run and its continuation, also with the shards on the CPU."""
    recipe, facts = at.out / "ranks.yaml", dict[str, Any]()
    options = {
        "model": {"path": str(save_model(at.out / "model-ranks")), "device": at.device.type},
        "data": {"train": str(save_rows(at.out / "rows.jsonl"))},
        "environment": f"{ROOT / 'tests' / 'support' / 'places.py'}:low_bytes",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 2, "batch_size": 3, "group_size": 4},
        "cluster": {"launcher": "local", "trainers": 1},
        "checkpoint": {"every": 1},
    }
    recipe.write_text(yaml.safe_dump(options))
    for name, more in (
        (("on the device", []), ("offload", ["cluster.fsdp.offload=cpu"])) if at.on_gpu else (("cpu", []),)
    ):
        for words in (["replace=true"], ["train.steps=3", "resume=auto"]):
            command = [sys.executable, "-m", "turnwise", "train", str(recipe), f"output={at.out / name}", *more, *words]
            paths = os.pathsep.join(sys.path[:2])
            environment = {**os.environ, "PYTHONPATH": paths}
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
            facts[f"{name} {words[-1]}"] = result.returncode or "ran"
            if result.returncode:
                facts[f"{name} {words[-1]}: end"] = (result.stderr or result.stdout)[-400:]
    return facts


def weights(at: Place) -> Facts:
    """The way of new weights to a server on the same machine, without the server: seconds of each part."""
    store, found = WeightFiles(), published_weights(at.model())
    facts: Facts = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        at.wait()
        facts[f"{name}, s"] = time.perf_counter() - start
        return result

    update = timed("trainer writes the file", lambda: store.write(1, found))
    read = timed("worker reads it, with checksum", lambda: worker._read(str(update.path), update.checksum))
    timed("worker looks for values that are not finite", lambda: worker._check_finite(read))
    there = timed("worker copies to the device", lambda: {name: value.to(at.device) for name, value in read.items()})
    timed("a copy on the device", lambda: {name: value.clone() for name, value in there.items()})
    store.close()
    return {"bytes": update.size, **facts}


SECTIONS: dict[str, Callable[[Place], Facts]] = {
    section.__name__: section
    for section in (machine, probes, attention, sampler, tests, trainer, engine, ranks, weights)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "first_contact")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--only", default=",".join(SECTIONS), help="names of sections, separated by commas")
    given = parser.parse_args()
    at = Place(torch.device(given.device), given.small, given.out.absolute())
    if at.on_gpu and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: to try this script, give --small --device cpu")
    at.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with (at.out / "first_contact.jsonl").open("a") as log:
        for name in given.only.split(","):
            start = time.perf_counter()
            try:
                facts = SECTIONS[name](at)
            except Exception as error:  # the other sections are worth knowing
                facts, failed = (
                    {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1200:]},
                    True,
                )
            line = json.dumps({"section": name, **facts, "seconds": round(time.perf_counter() - start, 1)}, default=str)
            log.write(line + "\n")
            log.flush()
            print(line, flush=True)
            if at.on_gpu:
                torch.cuda.empty_cache()
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
