"""Tries every decoder-only architecture of transformers with turnwise, on tiny models, and writes docs/models.md.

    python scripts/model_table.py                        # all families (about 8 minutes of CPU time), and the page
    python scripts/model_table.py qwen3_5_text lfm2      # these only, without the page
    python scripts/model_table.py --again                # nothing from build/models.json, which a stopped run leaves

The configuration of a tiny model is derived from its config class: standard names of sizes get small values (`SIZES`), a list
with an entry for each layer keeps each kind of entry, and everything else stays as the class has it. What no rule can know is
in `OVERRIDES`. Each family runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from turnwise.config.recipe import load
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.fused import FusedForward
from turnwise.models.loading import ModelSource, load_model, recompute_layers, use_complete_attention
from turnwise.models.lora import add_adapter, default_targets, merged, save_adapter
from turnwise.options.algorithm import PpoClip
from turnwise.options.schema import LoraSection
from turnwise.record.run_directory import RunDirectory
from turnwise.runs.training_run import TrainingRun
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train
from turnwise.training.batch import pack
from turnwise.training.forward import Forward
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.types import Request, Sampling

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # tokenizer, rows, environment and conversations are those of the tests

from support import byte_tokenizer  # noqa: E402
from support.recipes import save_recipe  # noqa: E402
from support.tiny import ends_of_turns, save_rows  # noqa: E402
from training.test_batch import group  # noqa: E402

# Tiny models

SCALE = 3
LAYERS, VOCABULARY, HIDDEN, HEADS, HEAD, ROTARY = 4, len(byte_tokenizer()), 64, 4, 16, 8
_NAMES: dict[Any, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers num_blocks",
    HIDDEN: "hidden_size n_embd d_model embedding_dim lru_width word_embed_proj_dim attention_hidden_size",
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads num_query_groups "
    "linear_num_value_heads linear_num_heads index_n_heads indexer_n_heads",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk moe_k "
    "num_experts_per_token num_kv_shared_layers zero_expert_num indexer_kv_heads",
    HEAD: "head_dim dim_head d_head kv_channels global_head_dim swa_head_dim v_head_dim qk_nope_head_dim index_head_dim "
    "attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim indexer_head_dim kv_lora_rank q_lora_rank "
    "o_lora_rank laurel_rank gated_norm_rank adapter_rank mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim "
    "mamba_headdim hc_lowrank mamba_chunk_size chunk_size block_size",
    ROTARY: "qk_rope_head_dim rotary_dim mamba_dt_rank time_step_rank hidden_size_per_layer_input block_multiple_of "
    "mamba_n_heads mamba_num_heads n_mamba_heads sliding_window attention_chunk_size window_size attention_window_size "
    "local_attention sliding_window_size",
    96: "intermediate_size ffn_hidden_size ffn_dim dim_ff dff d_inner n_inner intermediate_size_mlp dense_intermediate_size",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size router_hidden_size",
    "experts": "num_experts n_routed_experts num_local_experts moe_num_experts",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers "
    "mamba_n_groups mamba_ngroups n_groups bos_token_id",
    128: "mamba_d_ssm",
    512: "max_position_embeddings n_positions n_ctx max_seq_len context_length original_max_position_embeddings "
    "model_max_length",
    0: "pad_token_id",
}
SIZES: dict[str, int] = {
    name: {"heads": HEADS, "experts": 4}.get(value, value) for value, names in _NAMES.items() for name in names.split()
} | {"eos_token_id": 2}
"""A small value for each name of a size. A config gets those that it has."""
NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "n_routed_experts",
    "n_shared_experts",
    "rotary_dim",
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
)
"""Sizes that some classes leave out by default, and that their models then need."""

_ALTERNATE = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHARED_BLOCKS = {"attention_hidden_size": 128, "attention_head_dim": 32}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _ALTERNATE,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "qwen4_exp_text": {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4, "split_ngram_parts": 1},
    "zamba": _SHARED_BLOCKS,
    "zamba2": _SHARED_BLOCKS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "llama4_text": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What no rule can know: layers of several kinds where the class has one kind by default, and what a class insists on."""

OTHERS = {
    "blt": "reads bytes, in patches",
    "cohere_compass_text": "an embedding model",
    "bert-generation": "the decoder of an encoder-decoder model",
    "gemma4_assistant": "a draft model for speculative decoding",
    "gemma4_unified_assistant": "a draft model for speculative decoding",
    "whisper": "reads speech",
    "trocr": "reads images",
    "git": "reads images",
    "moshi": "speech",
    "musicgen": "music",
    "musicgen_melody": "music",
    "phi4_multimodal": "reads images and speech",
}
"""In transformers' list of causal language models, but no language models of their own."""


def families() -> Iterator[str]:
    """The decoder-only language models in transformers, by the name of their config (`model_type`)."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        masked = name in MODEL_FOR_MASKED_LM_MAPPING_NAMES or name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        if not masked and name not in OTHERS and not _has_parts(name):
            yield name


def _has_parts(name: str) -> bool:
    """Whether the model has a vision part besides its text model, which is a family of its own in the list."""
    return "text_config" in CONFIG_MAPPING[name].sub_configs


def tiny_config(name: str) -> PreTrainedConfig:
    """The smallest sensible configuration of a family."""
    default = CONFIG_MAPPING[name]()
    known = default.to_dict()
    layers = next((known[key] for key in _NAMES[LAYERS].split() if known.get(key)), default.num_hidden_layers)
    given: dict[str, Any] = {}
    for key, value in known.items():
        if key in SIZES and (value is not None or key in NEEDED):
            given[key] = SIZES[key]
        elif isinstance(value, list | tuple) and len(value) == layers:
            given[key] = each_kind(list(value), SIZES.get(key.removesuffix("_per_layer")))
    if known.get("num_key_value_heads") and known["num_key_value_heads"] == known.get("num_attention_heads"):
        given["num_key_value_heads"] = HEADS
    if known.get("qk_rope_head_dim") and known.get("head_dim") == known["qk_rope_head_dim"]:
        given["head_dim"] = ROTARY
    if known.get("qk_head_dim"):
        given["qk_head_dim"] = HEAD + ROTARY
    by_type = [kind for kind in known.get("rope_parameters") or () if kind.endswith("_attention")]
    if by_type and len(set(given.get("layer_types", by_type))) == 1:
        given["layer_types"] = (by_type * LAYERS)[:LAYERS]
    return type(default)(**{**given, **OVERRIDES.get(name, {})})


def each_kind(values: list[Any], size: int | None = None) -> list[Any]:
    """A value for each layer of the tiny model: all kinds in the order in which they first occur, or `size`.

    `[a, a, a, b, a, a, a, b]` becomes `[a, b, a, b]`, and `[a, b, b, b, b, b, b, b]` becomes `[a, b, b, b]`.
    """
    if size is not None:
        return [size] * LAYERS
    kinds = [value for place, value in enumerate(values) if value not in values[:place]]
    if values == [kinds[0], *[kinds[-1]] * (len(values) - 1)]:
        return (kinds[:1] + kinds[-1:] * LAYERS)[:LAYERS]
    return (kinds * LAYERS)[:LAYERS]


def tiny_model(name: str) -> PreTrainedModel:
    """A tiny model of a family with random weights, in evaluation mode.

    Matrices are scaled up: with those of a fresh model, all logits are about 0, and a wrong state would hardly change them.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(SCALE)
    use_complete_attention(model)
    return model


# Trials of one model

PROMPT, TURNS, CONVERSATIONS = 30, 3, 6


@dataclass(slots=True)
class Result:
    """What a family does. A trial that was not made is missing in both dictionaries."""

    family: str
    model: str = ""
    layers: list[str] = field(default_factory=list)
    """The kinds of layers of the tiny model, as its config names them."""
    values: dict[str, Any] = field(default_factory=dict)
    """What a trial that succeeded has measured."""
    problems: dict[str, str] = field(default_factory=dict)
    """The message of a trial that failed."""
    seconds: float = 0.0
    """CPU time."""


def try_family(name: str, folder: Path) -> Result:
    """Make a tiny model of a family and make all trials with it. `folder` is for its files."""
    result, began = Result(name), time.process_time()
    try:
        model = tiny_model(name)
    except Exception as error:
        result.problems["model"] = _message(error)
        return result
    result.model = type(model).__name__
    config = model.config.get_text_config()
    only = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    result.layers = list(dict.fromkeys(getattr(config, "layer_types", None) or [only]))
    if any(getattr(config, name, None) for name in _NAMES["experts"].split()):
        result.layers.append("experts")
    for trial, run in TRIALS.items():
        try:
            result.values[trial] = run(model, folder)
        except Exception as error:
            result.problems[trial] = _message(error)
            if trial in NEEDED_TRIALS:
                break
    result.seconds = round(time.process_time() - began, 1)
    return result


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if type(error).__module__.startswith("turnwise") else f"{type(error).__name__}: {text}"


async def _converse(engine: LocalEngine, number: int) -> tuple[list[tuple[list[int], int, list[float]]], int, int]:
    """Samples with (tokens, start of the sample, its log-probabilities), cached and possible tokens of the later turns."""
    # three conversations have the same prompt
    tokens = np.random.default_rng(number // 3).integers(3, VOCABULARY, PROMPT).tolist()
    random, samples, cached, possible = np.random.default_rng(100 + number), [], 0, 0
    for turn in range(TURNS):
        sampling = Sampling(max_tokens=int(random.integers(3, 8)), temperature=1.0)
        request = Request(conversation=f"c{number}", token_ids=list(tokens), sampling=sampling, seed=10 * number + turn)
        completion = await engine.generate(request)
        if turn:
            cached, possible = (
                cached + completion.cached_tokens,
                possible + len(samples[-1][0]) - 1,
            )  # the last sampled token was not computed
        start = len(tokens)
        tokens = [*tokens, *completion.token_ids]
        samples.append((tokens, start, list(completion.logprobs)))
        tokens = [*tokens, *random.integers(3, VOCABULARY, int(random.integers(1, 9))).tolist()]
    return samples, cached, possible


def try_engine(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Conversations of several turns: the largest difference of a log-probability from that of one pass without a cache."""

    async def run() -> Any:
        engine = LocalEngine(model, threads=1, context=256)
        held = await asyncio.gather(*(_converse(engine, number) for number in range(CONVERSATIONS)))
        fused = isinstance(engine._core.forward, FusedForward)
        await engine.close()
        return held, fused

    held, fused = asyncio.run(run())
    largest = 0.0
    for tokens, start, logprobs in [sample for samples, _, _ in held for sample in samples]:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            all_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        own_N = all_TV[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)
        largest = max(largest, (own_N - torch.tensor(logprobs)).abs().max().item())
    if not largest < 1e-4:
        raise RuntimeError(f"log-probabilities over the cache differ by {largest:.2g} from those of one pass")
    cached = sum(cached for _, cached, _ in held) / sum(possible for _, _, possible in held)
    return {"difference": largest, "fused": fused, "cached": cached}


def try_greedy(model: PreTrainedModel, folder: Path) -> bool:
    """Greedy sampling gives the tokens of `model.generate`."""
    prompt = np.random.default_rng(7).integers(3, VOCABULARY, 12).tolist()
    ids = torch.tensor([prompt])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()

    async def ask() -> list[int]:
        engine = LocalEngine(model, threads=1, context=128)
        sampling = Sampling(max_tokens=12, temperature=0.0)
        completion = await engine.generate(Request(conversation="a", token_ids=prompt, sampling=sampling, seed=0))
        await engine.close()
        return completion.token_ids

    if (sampled := asyncio.run(ask())) != own:
        raise RuntimeError(f"generate gives {own}, the engine {sampled}")
    return True


class _NoReport(TrainReport):
    """No curve is drawn at the end, which would take longer than the run."""

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        pass


def _run(folder: Path, name: str, *overrides: str, learns: bool = True) -> tuple[TrainingRun, list[dict[str, Any]]]:
    """A short run with conversations of two turns: the run, and the metrics of its steps. `learns`: each step has a gradient."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        save_recipe(
            folder,
            folder / "model",
            data={"train": str(save_rows(folder / "train.jsonl", 4))},
            limits={"turns": 2, "tokens_per_turn": 6, "context": 256},
            train={"steps": 1, "batch_size": 2, "group_size": 4, "lr": 0.001},
            checkpoint={"every": 100},
        )
    out = folder / name
    run = assemble(load(recipe, [*overrides, f"output={out}"])[0])
    asyncio.run(train(run, _NoReport(Console(quiet=True))))
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "ratio/max_deviation" in line]
    if learns and not all(line["grad_norm"] > 0 for line in steps):
        raise RuntimeError("a training step had no gradient")
    return run, steps


def try_training(model: PreTrainedModel, folder: Path) -> dict[str, float]:
    """Two training steps: the largest deviation of a ratio, and the share of tokens that are shared. Checks the checkpoint."""
    tokenizer = byte_tokenizer()
    copied = copy.deepcopy(model)
    copied.generation_config.eos_token_id = ends_of_turns(tokenizer)
    copied.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    run, steps = _run(folder, "train", "train.steps=2")
    deviation = max(line["ratio/max_deviation"] for line in steps)
    if not deviation < 1e-4:
        raise RuntimeError(f"the ratios deviate by {deviation:.2g} from 1")
    return {"deviation": deviation, "shared": steps[-1]["tokens/prefix_saved"], **_reloaded(run, folder)}


def _reloaded(run: TrainingRun, folder: Path) -> dict[str, float]:
    """The largest difference of the logits of the checkpoint from those of the model that was trained."""
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        trained = run.learner.model(ids, use_cache=False).logits  # type: ignore[attr-defined]
        saved = load_model(ModelSource(path=str(folder / "train" / "checkpoint"), device="cpu"))
        difference = (saved(ids, use_cache=False).logits - trained).abs().max().item()
    if not difference < 1e-5:
        raise RuntimeError(f"the checkpoint gives logits that differ by {difference:.2g}")
    return {"reloaded": difference}


def try_autocast(model: PreTrainedModel, folder: Path) -> float:
    """A training step with matrix products in bfloat16, in engine and trainer: the largest deviation of a ratio."""
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.ndim == 2:  # the scale of `tiny_model` enlarges what bfloat16 rounds
                parameter.div_(SCALE)
    plain.generation_config.eos_token_id = ends_of_turns(byte_tokenizer())
    plain.save_pretrained(folder / "plain")
    byte_tokenizer().save_pretrained(folder / "plain")
    _, steps = _run(folder, "autocast", "model.autocast=true", f"model.path={folder / 'plain'}", learns=False)
    deviation = max(line["ratio/max_deviation"] for line in steps)
    if not deviation < 0.2:
        raise RuntimeError(f"the ratios deviate by {deviation:.2g} from 1")
    return deviation


def try_lora(model: PreTrainedModel, folder: Path) -> list[str]:
    """Steps with an adapter on the default target modules, saved, and merged into the model again: the names of the modules."""
    adapted = copy.deepcopy(model)
    add_adapter(adapted, LoraSection(rank=2, alpha=4))
    learner = LocalLearner(adapted, sampling=Sampling(), loss=make_loss(PpoClip(kl_coef=0.5)), threads=1)
    batch = pack(group(), share_prompts=learner.requirements.share_prompts)
    first, second = (asyncio.run(learner.update([batch], lr=1e-2)) for _ in range(2))
    if not (first.grad_norm > 0 and abs(first.kl) < 1e-6 < second.kl):
        raise RuntimeError(f"the gradient norm is {first.grad_norm}, and the KL {first.kl}, then {second.kl}")
    (folder / "adapter").mkdir()
    save_adapter(adapted, folder / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        own = adapted(ids, use_cache=False).logits
        difference = (merged(copy.deepcopy(model), folder / "adapter")(ids, use_cache=False).logits - own).abs().max()
    # relative: Mamba's logits in float32 are 1e-4 from those in float64
    if not difference < 1e-4 * max(1.0, float(own.abs().max())):
        raise RuntimeError(f"the merged model gives logits that differ by {float(difference):.2g}")
    return sorted({target.rpartition(".")[2] for target in default_targets(model)})


def try_checkpointing(model: PreTrainedModel, folder: Path) -> float:
    """Recomputed layers give the same gradients: the largest difference, relative to the largest gradient."""
    gradients: list[dict[str, torch.Tensor]] = []
    (micro, *_) = pack(group(), share_prompts=False).micro_batches
    for recompute in (False, True):
        one = copy.deepcopy(model)
        if recompute:
            recompute_layers(one)
        logprob_N = Forward(one, Sampling()).logprobs(micro)[0]
        (logprob_N * micro.targets.advantage_N).sum().backward()
        gradients.append({name: part.grad for name, part in one.named_parameters() if part.grad is not None})
    plain, again = gradients
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    difference = max(float((again[name] - gradient).abs().max()) for name, gradient in plain.items()) / largest
    if not difference < 1e-5:
        raise RuntimeError(f"the gradients differ by {difference:.2g}")
    return difference


def try_critic(model: PreTrainedModel, folder: Path) -> float:
    """A critic with the body of the model learns returns: its loss after three steps, as a share of that before."""
    critic, trajectories, losses = LocalCritic(copy.deepcopy(model), threads=1), group(), []
    level = ValuePacking(level="turn", micro_batch_tokens=2048, share_prompts=critic.requirements.share_prompts)
    for _ in range(4):
        set_values(trajectories, asyncio.run(critic.values(pack_states(trajectories, level))), "turn")
        for conversation, goal in zip(trajectories, (1.0, 0.0, 1.0, -1.0), strict=True):
            conversation.returns = [goal for _ in conversation.values]
        losses.append(asyncio.run(critic.update([pack_value_targets(trajectories, level)], lr=3e-3)).loss)
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the losses of four steps are {losses}")
    return losses[-1] / losses[0]


TRIALS: Mapping[str, Callable[[PreTrainedModel, Path], Any]] = {
    "engine": try_engine,
    "greedy": try_greedy,
    "train": try_training,
    "lora": try_lora,
    "checkpointing": try_checkpointing,
    "critic": try_critic,
    "autocast": try_autocast,
}
"""What is tried with each model, in this order."""
NEEDED_TRIALS = ("engine", "train")
"""Without these, a family does not work, and the other trials are left out."""


# All families, each in a process of its own

CACHE = ROOT / "build" / "models.json"
LIMIT_S, DEADLOCK_S = 60, 900
"""Seconds of CPU time for a family, and of real time, after which its process is ended."""
_SIGNALS = {signal.SIGPROF: f"it takes more than {LIMIT_S} seconds of CPU time", signal.SIGALRM: "it does not end"}


def run_all(names: list[str], jobs: int, done: Callable[[Result], None]) -> None:
    """Try the families in `jobs` processes at a time, and report each result."""
    running: dict[int, tuple[str, Path]] = {}
    waiting = list(names)
    with tempfile.TemporaryDirectory() as base:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                folder = Path(base) / name
                folder.mkdir()
                running[_start(name, folder)] = (name, folder)
            pid, status = os.wait()
            name, folder = running.pop(pid)
            file = folder / "result.json"
            died = _SIGNALS.get(os.WTERMSIG(status), f"the process ended with status {status}")
            done(Result(**json.loads(file.read_text())) if file.exists() else Result(name, problems={"model": died}))


def _start(name: str, folder: Path) -> int:
    """Try a family in a new process, which has all modules already. Returns its number."""
    if pid := os.fork():
        return pid
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.alarm(DEADLOCK_S)
    os.dup2(os.open(folder / "output", os.O_CREAT | os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    result = try_family(name, folder)
    (folder / "result.json.new").write_text(json.dumps(asdict(result)))
    (folder / "result.json.new").rename(folder / "result.json")
    os._exit(0)


# The page

PAGE = ROOT / "docs" / "models.md"
_REASONS = {
    "indexed_attention": "its attention selects the tokens that it reads",
    "compressed_sparse_attention": "its attention reads compressed keys, and selects some of them",
    "returns no cache": "it returns no cache of keys, values or states as transformers' other models do",
    "cache of its own": "it insists on a cache class of its own",
    "its logits differ": "its positions or windows follow from the length of the cache, which is one for all rows",
    "has wrong shape": "its own pass over its cache fails in this version of transformers",
    "does not take our cache and masks": "its attention builds biases from a mask of two dimensions",
}
"""By a part of the message: the reason in a few words."""
INSTEAD = {
    "axk2": "`axk1`",
    "bloom": "`llama`, `qwen3`",
    "cpmant": "`minicpm3`",
    "deepseek_v32": "`deepseek_v3`",
    "deepseek_v4": "`deepseek_v3`",
    "glm_moe_dsa": "`glm4_moe`, `glm4_moe_lite`",
    "gpt_neo": "`gpt_neox`",
    "hy_v4": "`hy_v3`",
    "inkling_text": "`falcon_h1`, `zaya` (attention and convolutions in one layer)",
    "minimax": "`minimax_m2`",
    "openai-gpt": "`gpt2`",
    "qwen4_exp_text": "`qwen3_5_text`, `qwen3_5_moe_text`",
    "recurrent_gemma": "`gemma3_text`, `granitemoehybrid`",
    "rwkv": "`mamba2`, `qwen3_5_text`",
    "xlnet": "`qwen3`",
    "xlstm": "`mamba2`, `qwen3_5_text`",
}
"""What to use in the place of a family that is refused."""
_NOT = {
    "greedy": "greedy sampling as `generate`",
    "lora": "LoRA",
    "checkpointing": "gradient checkpointing",
    "critic": "critic",
    "autocast": "autocast",
}
_TEXT = """# Models

All families of decoder-only language models in transformers {version}, tried with tiny models of random weights that have all
kinds of their layers (names: `model_type` in config.json; images: [multimodal](multimodal.md)). {works} of {count} work: the
engine's log-probabilities are those of the model's own pass (1e-4), ratios of two training steps are 1 up to rounding, and
checkpoints load with the same logits. Greedy sampling, adapters, gradient checkpointing, critics and `model.autocast` were tried,
too; remarks name what does not work. `make models` writes this page.

- *full*, *sliding*, *chunked*: attention; *linear*: a recurrent state, or the window of a convolution; *hybrid*: both in one
  layer; *experts*: a mixture of experts.
- *fused*: the engine has its own pass for the family; otherwise it uses the model's. Both compute only the new tokens of a turn.
- *own rows*: in training, each conversation has a row of its own. Elsewhere, the prompt of a group is computed once.

| families | layers | remarks |
|---|---|---|
{rows}

## Refused

These stop at the start with the reason. No other engine was tried with them.

| family, and what to use instead | why |
|---|---|
{refused}

Not language models of their own, and not tried: {others}. Encoders and encoder-decoder models are refused.
"""


def write_page(results: Mapping[str, Result]) -> None:
    """Write docs/models.md from the results of all families."""
    works = [result for result in results.values() if all(trial in result.values for trial in NEEDED_TRIALS)]
    refused = [result for result in results.values() if result not in works]
    reasons: dict[str, list[str]] = {}
    for result in sorted(refused, key=lambda result: result.family):
        reasons.setdefault(_reason(result), []).append(f"`{result.family}`: {INSTEAD.get(result.family, 'none')}")
    text = _TEXT.format(
        version=transformers.__version__,
        works=len(works),
        count=len(results),
        rows="\n".join(_rows(works)),
        refused="\n".join(f"| {'; '.join(names)} | {reason} |" for reason, names in reasons.items()),
        others=", ".join(f"`{name}`" for name in OTHERS),
    )
    PAGE.write_text(text, encoding="utf-8")


def _rows(works: list[Result]) -> list[str]:
    """A row for all families with the same layers and remarks; the rows in the order of their layers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for result in sorted(works, key=lambda result: result.family):
        groups.setdefault(_cells(result), []).append(f"`{result.family}`")
    order = sorted(groups, key=lambda cells: (cells[0].count(","), cells[0], -len(groups[cells])))
    return [f"| {', '.join(groups[cells])} | {' | '.join(cells)} |".replace("|  |", "| |") for cells in order]


def _cells(result: Result) -> tuple[str, str]:
    kinds = {_KINDS.get(kind, kind.removesuffix("_attention")) for kind in result.layers} - {""}
    remarks = [
        *(["fused"] if result.values["engine"]["fused"] else []),
        *([] if result.values["train"]["shared"] else ["own rows"]),
        *(f"no {what}: {_why(result.problems[trial])}" for trial, what in _NOT.items() if trial in result.problems),
    ]
    return ", ".join(sorted(kinds, key=_ORDER.index)), "; ".join(remarks)


_ORDER = ("full", "sliding", "chunked", "linear", "hybrid", "experts")
_KINDS = {"conv": "linear", "mamba": "linear", "hybrid_sliding": "hybrid", "mlp": "", "moe": "experts"}


def _reason(result: Result) -> str:
    message = next(iter(result.problems.values()))
    return next((reason for part, reason in _REASONS.items() if part in message), _why(message))


def _why(message: str) -> str:
    """A message in one table cell."""
    first = re.sub(r"^(the embedded engine cannot run \w+|model\.\w+): ", "", message).partition(". ")[0]
    return (first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ...").replace("|", "\\|")


_LONGEST = 150


def known_results(file: Path) -> dict[str, Result]:
    """The results of a run that was stopped."""
    if not file.exists():
        return {}
    return {name: Result(**value) for name, value in json.loads(file.read_text()).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="names of configs (default: all)")
    parser.add_argument(
        "--results", type=Path, default=CACHE, help=f"the file with what is known so far (default: {CACHE})"
    )
    parser.add_argument("--again", action="store_true", help="forget the results of a stopped run")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: one for each core)"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results = {} if arguments.again else known_results(arguments.results)
    every = list(families())
    names = arguments.families or [name for name in every if name not in results]
    arguments.results.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    add_adapter(tiny_model("llama"), LoraSection(rank=2, alpha=2))  # imports peft once for all processes

    def done(result: Result) -> None:
        results[result.family] = result
        arguments.results.write_text(json.dumps({name: asdict(one) for name, one in results.items()}, indent=1))
        problems = "; ".join(f"{trial}: {text}" for trial, text in result.problems.items())
        print(
            f"{len(results):4d} of {len(every)}  {result.family:24s} {result.seconds:5.1f} s  {problems or 'works'}",
            flush=True,
        )

    run_all(names, arguments.jobs, done)
    if not arguments.families:
        write_page(results)
        arguments.results.unlink()


if __name__ == "__main__":
    main()
