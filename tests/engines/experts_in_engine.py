"""In the environment of vLLM or SGLang, a model computes a prompt, and the engine's own code records and encodes the experts.

    python experts_in_engine.py vllm DIRECTORY [5, 6, 7]

The servers report experts on GPUs only: vLLM by its second model runner, which needs Triton, and SGLang from memory that it
registers with CUDA. So this program binds the recorder to a model in this process, and gives it plain memory. Prints what the
server would send of the prompt's tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_LOADER = Path(__file__).resolve().parents[2] / "scripts" / "engines" / "load_weights.py"


def of_vllm(folder: Path, prompt: list[int]) -> str:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")
    from types import SimpleNamespace

    from vllm import LLM, SamplingParams
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )
    from vllm.utils.serial_utils import numpy2base64

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=2,
    )
    capturer = RoutedExpertsCapturer(512, llm.llm_engine.vllm_config)
    llm.apply_model(lambda model: bind_routed_experts_capturer(model, capturer))
    llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    rows = capturer.snapshot_routing_data(len(prompt)).numpy()
    request = SimpleNamespace(request_id="a", num_tokens=len(prompt) + 1, is_finished=lambda: True)
    taken = AuxOutputSchedulerConnector().take_output(request, {"a": AuxRequestOutput(0, rows)})
    return numpy2base64(taken)


def of_sglang(folder: Path, prompt: list[int]) -> str:
    spec = importlib.util.spec_from_file_location("load_weights", _LOADER)
    loader: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.import_sglang()
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.state_capturer import base
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    base.ALLOC_MEMORY_FUNCS["cpu"] = lambda size, dtype, **options: torch.empty(size, dtype=dtype)
    runner = loader.sglang_runner(*loader.sglang_arguments(folder, "--enable-return-routed-experts"))
    with torch.no_grad():
        (req,) = requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, 0, [prompt])
        one_batch.extend(requests, runner)
    experts = get_global_experts_capturer().get_topk(req.kv.req_pool_idx, len(prompt) + 1, runner.req_to_token_pool)
    (text,) = DetokenizerManager._b64_encode_per_request([experts])
    return text


if __name__ == "__main__":
    engine, folder, prompt = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    print("RESULT", {"vllm": of_vllm, "sglang": of_sglang}[engine](folder, prompt), flush=True)
    os._exit(0)
