"""Loads weights into the models of vLLM or SGLang, inside their environments (see scripts/engine_families.py).

    python load_weights.py vllm DIRECTORY...

Each directory has a checkpoint, `update.sent` (weights as turnwise sends them) and `expected.json` (log-probabilities of
transformers, with the weights of the checkpoint and with those that are sent; and what difference is none). Each is tried in a
process of its own, forked after the engine was imported. Prints a line `RESULT {...}` for each.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

LIMIT = 900
"""Seconds for one model, on a busy machine."""


def values(tensors: Any) -> torch.Tensor:
    """All different values of tensors, sorted."""
    return torch.unique(torch.cat([tensor.detach().float().flatten() for tensor in tensors]))


def compared(model: Any, sent: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The engine's parameters without a new value, and the weights that were sent and are not in the model.

    A weight may be in the model in another form (SGLang and vLLM keep -exp(A_log) for A_log), so this weight and those of one
    dimension are not called lost.
    """
    parameters = dict(model.named_parameters())
    unset = [name for name, tensor in parameters.items() if bool(tensor.detach().isnan().any())]
    there = values(parameters.values())
    lost = [
        name
        for name, tensor in sent.items()
        if tensor.ndim > 1
        and not name.endswith("A_log")
        and not bool(torch.isin(tensor.float().flatten()[:: max(1, tensor.numel() // 500)], there).all())
    ]
    return {"unset": unset, "lost": lost}


def emptied(model: Any) -> None:
    """NaN in all parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


# vLLM


def import_vllm() -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    import vllm
    import vllm.model_executor.models.registry  # noqa: F401


def try_vllm(folder: Path, sent: dict[str, torch.Tensor]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry

    config = json.loads((folder / "config.json").read_text())
    if config["architectures"][0] not in ModelRegistry.get_supported_archs():
        return {"error": "not served"}
    expected = json.loads((folder / "expected.json").read_text())
    common: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": None,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "generation_config": "vllm",
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        **expected["vllm"],
    }
    try:
        result = run_vllm(folder, sent, common)
        if (before := result.get("deviations", [0.0])[0]) < expected["equal"]:
            return result
        reason = f"already before an update, its log-probabilities are {before:.2g} from those of transformers"
    except Exception as error:
        traceback.print_exc()
        reason = first_line(error)
    common["limit_mm_per_prompt"] = {"image": 1, "video": 0}  # with 0, there would be no vision tower
    from vllm.triton_utils import triton

    if not hasattr(triton, "set_allocator"):  # without Triton; the kernels, which need memory of it, are not run here
        triton.set_allocator = lambda allocate: None
    result = load_vllm(sent, EngineArgs(**common).create_engine_config())
    return {**result, "not_run": reason}


def run_vllm(folder: Path, sent: dict[str, torch.Tensor], common: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities before and after an update by turnwise's worker extension."""
    from vllm import LLM, SamplingParams

    llm = LLM(**common, worker_extension_cls="turnwise.engines.vllm.worker.WeightReceiver")
    expected = json.loads((folder / "expected.json").read_text())
    deviations = []
    for number, logprobs in enumerate(expected["logprobs"]):
        if number == 1:
            from zlib import crc32

            content = (folder / "update.sent").read_bytes()
            arguments = {
                "owner": "a",
                "lease": 60.0,
                "path": str(folder / "update.sent"),
                "checksum": f"{crc32(content):08x}",
            }
            (answer,) = llm.collective_rpc("turnwise_load", kwargs=arguments)
            if "error" in answer:
                return {"error": str(answer["error"])[:200]}
        prompt = {"prompt_token_ids": expected["prompt"]}
        (output,) = llm.generate(
            [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False
        )
        own = [
            entry[token].logprob
            for token, entry in zip(expected["prompt"][1:], output.prompt_logprobs[1:], strict=True)
        ]
        deviations.append(max(abs(a - b) for a, b in zip(own, logprobs, strict=True)))
    return {"deviation": max(deviations), "deviations": deviations}


def load_vllm(sent: dict[str, torch.Tensor], config: Any) -> dict[str, Any]:
    """What the engine's own loader does with the weights, without running the model."""
    import tempfile

    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
            initialize_model_parallel(1)
        torch.set_default_dtype(torch.float32)
        model = initialize_model(vllm_config=config)
        emptied(model)
        model.load_weights(iter(sent.items()))
        return compared(model, sent)


# SGLang


def import_sglang() -> None:
    import sglang.srt.entrypoints.http_server
    import sglang.srt.models.registry  # noqa: F401


def try_sglang(folder: Path, sent: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Logits before and after an update from a file, as the route /update_weights_from_disk loads it."""
    from sglang.srt.models.registry import ModelRegistry

    config = json.loads((folder / "config.json").read_text())
    if config["architectures"][0] not in ModelRegistry.get_supported_archs():
        return {"error": "not served"}
    runner = sglang_runner(*sglang_arguments(folder))
    try:
        return run_sglang(folder, sent, runner)
    except Exception as error:
        traceback.print_exc()
        reason = first_line(error)
    emptied(runner.model)
    with torch.no_grad():
        runner.model.load_weights(iter(sent.items()))
    return {**compared(runner.model, sent), "not_run": reason}


def sglang_arguments(folder: Path, *further: str) -> tuple[Any, Any]:
    """The arguments of a server on the CPU, and its ports."""
    import shlex

    from sglang.srt.server_args import PortArgs, prepare_server_args

    arguments = shlex.split(
        f"--model-path={folder} --dtype=float32 --context-length=256 --device=cpu --attention-backend=torch_native "
        "--sampling-backend=pytorch --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled "
        "--disable-overlap-schedule --mem-fraction-static=0.2 --max-total-tokens=2048 --max-running-requests=32 "
        "--skip-tokenizer-init"
    )
    server_args = prepare_server_args([*arguments, *further])
    server_args.resolve_once()
    return server_args, PortArgs.init_new(server_args)


def sglang_runner(server_args: Any, port_args: Any) -> Any:
    """SGLang's runner of a model, in this process, as its own benchmark makes it."""
    from sglang.benchmark import one_batch

    one_batch.get_tokenizer = lambda *args, **kwargs: None
    one_batch._set_envs_and_config(server_args)
    ranks = one_batch.SpawnRanks(world_rank=0, gpu_id=0)
    one_batch.publish(server_args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, port_args, 0, 0)
    return runner.torch_runner


def run_sglang(folder: Path, sent: dict[str, torch.Tensor], runner: Any) -> dict[str, Any]:
    from sglang.benchmark import one_batch

    expected = json.loads((folder / "expected.json").read_text())
    prompt = expected["prompt"]
    prefixes = [prompt[:length] for length in range(1, len(prompt))]
    deviations = []
    for number, logprobs in enumerate(expected["logprobs"]):
        if number == 1:
            update = folder / "sent"
            update.mkdir(exist_ok=True)
            (update / "model.safetensors").unlink(missing_ok=True)
            (update / "model.safetensors").symlink_to(folder / "update.sent")
            done, message = runner.weight_updater.update_weights_from_disk(str(update), "auto")
            if not done:
                return {"error": message[:200]}
        one_batch._TorchBenchRunner(runner).clear()
        with torch.no_grad():
            reqs = one_batch.prepare_synthetic_inputs_for_latency_test(len(prefixes), 0, prefixes)
            _, logits_BV, _ = one_batch.extend(reqs, runner)
        own = logits_BV.float().log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        deviations.append(max(abs(a - b) for a, b in zip(own, logprobs, strict=True)))
    return {"deviation": max(deviations), "deviations": deviations}


def first_line(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]


def child(engine: str, folder: Path, write: int) -> None:
    try:
        sent = load((folder / "update.sent").read_bytes())
        result = {"vllm": try_vllm, "sglang": try_sglang}[engine](folder, sent)
    except BaseException as error:
        traceback.print_exc()
        result = {"error": first_line(error)}
    os.write(write, json.dumps(result).encode())
    os._exit(0)


def main() -> None:
    engine, folders = sys.argv[1], [Path(name) for name in sys.argv[2:]]
    {"vllm": import_vllm, "sglang": import_sglang}[engine]()
    torch.set_num_threads(1)
    for folder in folders:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            import signal

            signal.alarm(LIMIT)
            child(engine, folder, write)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            answer = stream.read()
        os.waitpid(pid, 0)
        result = json.loads(answer) if answer else {"error": "the process died"}
        print("RESULT " + json.dumps({"folder": str(folder), **result}), flush=True)


if __name__ == "__main__":
    main()
