"""Fused kernels of liger-kernel in the layers of one model: the values and gradients of transformers' own layers.

Quick tests use a stand-in for the library (`support/liger_stub`), which overwrites what the library overwrites. The library
itself runs in Triton's interpreter (`support/liger_on_cpu.py`) where both are installed, and on a GPU in `test_cuda.py`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.llama import modeling_llama as llama

from support import liger_on_cpu
from training.test_precision import SIZES, made
from training.test_tree import FAMILIES
from turnwise.doctor.memory import PassOptions, Workload, traced_pass
from turnwise.errors import ConfigError
from turnwise.models import kernels
from turnwise.models.kernels import Functions, of_library, of_trace, replace_layers, use_kernels
from turnwise.models.loading import ModelSource, load_model

STUB = Path(__file__).parent.parent / "support" / "liger_stub"
CUDA = torch.device("cuda")


@contextmanager
def installed_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, as if it were installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STUB))
    kernels._wrong.cache_clear()
    yield importlib.import_module("liger_kernel.ops")
    kernels._wrong.cache_clear()
    for name in ("liger_kernel", "liger_kernel.ops"):
        sys.modules.pop(name, None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The same, as if it ran on CUDA."""
    with installed_kernels(monkeypatch) as ops:
        monkeypatch.setattr(kernels, "_wrong", lambda device: None)
        yield ops
        monkeypatch.undo()


# Which layers

NORM, GEMMA = "norm llama 0.0", "norm gemma 1.0"
REPLACED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama": ({"RMSNorm": 5, "rotary embeddings": 2, "SwiGLU": 2}, {NORM: 5, "rope": 2, "silu_mul": 2}),
    "qwen2": ({"RMSNorm": 5, "rotary embeddings": 2, "SwiGLU": 2}, {NORM: 5, "rope": 2, "silu_mul": 2}),
    "qwen3": ({"RMSNorm": 9, "rotary embeddings": 2, "SwiGLU": 2}, {NORM: 9, "rope": 2, "silu_mul": 2}),
    "mistral with windows": ({"RMSNorm": 5, "rotary embeddings": 2, "SwiGLU": 2}, {NORM: 5, "rope": 2, "silu_mul": 2}),
    # its feed-forward layers have GELU, and are left alone
    "gemma": ({"RMSNorm": 5, "rotary embeddings": 2}, {GEMMA: 5, "rope": 2}),
    # experts have weights in one tensor, and a forward of their own
    "qwen3 moe": ({"RMSNorm": 9, "rotary embeddings": 2}, {NORM: 9, "rope": 2}),
    # phi3 rotates a part of each head, and has gate and up in one matrix
    "phi3 with windows": ({"RMSNorm": 5}, {NORM: 5}),
}


@pytest.mark.parametrize("family", REPLACED)
def test_layers_with_the_code_of_llama_get_the_kernels(library: Any, family: str) -> None:
    model = made(FAMILIES[family]())
    types, names = [type(module) for module in model.modules()], list(model.state_dict())
    replaced, called = REPLACED[family]
    assert replace_layers(model, of_library()) == replaced
    assert [type(module) for module in model.modules()] == types
    assert list(model.state_dict()) == names
    library.CALLS.clear()
    model(torch.arange(5)[None])
    assert dict(library.CALLS) == called


def test_other_models_of_the_process_stay_as_they_are(library: Any) -> None:
    config = FAMILIES["llama"]()
    other = made(config)
    functions = (llama.apply_rotary_pos_emb, llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward)
    model = made(config)
    replace_layers(model, of_library())
    assert (llama.apply_rotary_pos_emb, llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward) == functions
    library.CALLS.clear()
    other(torch.arange(5)[None])
    made(config)(torch.arange(5)[None])
    assert not library.CALLS


def test_a_copy_of_a_model_has_layers_of_its_own(library: Any) -> None:
    model = made(FAMILIES["qwen3"]())
    replace_layers(model, of_library())
    second = copy.deepcopy(model)
    ids = torch.arange(5)[None]
    before = model(ids).logits
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.5)
    assert torch.equal(model(ids).logits, before)
    assert not torch.allclose(second(ids).logits, before)


def test_norms_under_autocast_whose_input_has_another_type_are_the_models_own(library: Any) -> None:
    model = made(FAMILIES["qwen3"]())
    replace_layers(model, of_library())
    norm = model.model.layers[0].self_attn.q_norm
    library.CALLS.clear()
    found = norm(torch.randn(2, 8, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert not library.CALLS


def test_rotations_of_another_shape_are_the_models_own(library: Any) -> None:
    """Keys of another length than the queries, heads after tokens, a part of each head."""
    own: Counter[str] = Counter()

    def plain(*arguments: Any) -> Any:
        own["plain"] += 1
        return llama.apply_rotary_pos_emb(*arguments)

    angle_1LD = torch.linspace(0.0, 2.0, 12).reshape(1, 3, 4).repeat(1, 1, 2)
    turns = (angle_1LD.cos(), angle_1LD.sin())
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    expected = llama.apply_rotary_pos_emb(query, key, *turns)
    swapped = kernels._rotate(of_library(), plain, query.transpose(1, 2), key.transpose(1, 2), *turns, unsqueeze_dim=2)
    assert all(torch.equal(one, other.transpose(1, 2)) for one, other in zip(swapped, expected, strict=True))
    assert own["plain"] == 1
    found = kernels._rotate(of_library(), plain, query.clone(), key.clone(), *turns)
    assert own["plain"] == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# The learner's pass


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", ""),
        ("qwen3", "LoRA"),
        ("gemma", ""),
        ("qwen3 moe", "checkpointing"),
        ("qwen3", "autocast"),
        ("qwen2", "bfloat16"),
    ],
)
def test_flat_rows_with_shared_prefixes_have_the_values_and_gradients_of_plain_layers(
    library: Any, family: str, variant: str
) -> None:
    check(liger_on_cpu.differences(family, variant), variant)


def check(found: dict[str, Any], variant: str) -> None:
    """Rounding in float32; in half precision no more than plain layers are from float64."""
    if variant == "bfloat16":
        assert found["fused logprobs from float64"] < 1.3 * found["plain logprobs from float64"] + 1e-4
        assert found["fused gradients from float64"] < 1.3 * found["plain gradients from float64"] + 1e-3
    else:
        limit = 3e-2 if variant == "autocast" else 2e-5
        assert found["logprobs"] < limit
        assert found["gradients"] < limit


CASES = [
    *REPLACED,
    "gemma2 without soft caps, with windows",
    "gemma3 with windows",
    "mixtral",
    *("llama:LoRA", "qwen3:checkpointing", "qwen3:autocast", "qwen3:bfloat16", "gemma:bfloat16"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="needs liger-kernel and triton: pip install 'turnwise[liger]'",
)
def test_the_librarys_own_kernels_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "support.liger_on_cpu", *CASES]
    done = subprocess.run(command, cwd=STUB.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == CASES
    for one in found:
        check(one, one["case"].partition(":")[2])
        assert one["kept"] == one["kept by the trace"]
        assert one["RMSNorm replaced"] > 0


# Whether a model gets them


def test_without_a_gpu_auto_changes_nothing_and_liger_is_refused(library: Any, model: Path) -> None:
    loaded = load_model(ModelSource(path=str(model), device="cpu"))
    library.CALLS.clear()
    loaded(torch.arange(5)[None])
    assert not library.CALLS
    with pytest.raises(
        ConfigError, match=r"model\.kernels=liger: its kernels run on CUDA only, and the model is on the device cpu"
    ):
        load_model(ModelSource(path=str(model), device="cpu", kernels="liger"))


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "is_installed", lambda: False)
    model = made(FAMILIES["llama"]())
    with pytest.raises(
        ConfigError, match=r"model\.kernels=liger: liger-kernel is not installed: pip install 'turnwise\[liger\]'"
    ):
        use_kernels(model, "liger", CUDA)
    with caplog.at_level(logging.INFO):
        use_kernels(model, "auto", CUDA)
    assert "model.kernels=auto: without fused kernels, because liger-kernel is not installed" in caplog.text


def test_a_model_without_such_layers(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = made(
        hf.GPTNeoXConfig(
            **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}, num_attention_heads=4
        )
    )
    with pytest.raises(
        ConfigError, match=r"GPTNeoXForCausalLM has no layer that liger-kernel computes.* Set model\.kernels=none"
    ):
        use_kernels(model, "liger", CUDA)
    with caplog.at_level(logging.INFO):
        use_kernels(model, "auto", CUDA)
    assert "without fused kernels, because GPTNeoXForCausalLM has no layer" in caplog.text


@pytest.mark.parametrize("chosen", ["auto", "liger"])
def test_what_is_computed_by_kernels_is_said(library: Any, chosen: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        use_kernels(made(FAMILIES["llama"]()), chosen, CUDA)
    assert (
        f"model.kernels={chosen}: liger-kernel 0.8.5 computes 2 rotary embeddings, 2 SwiGLU, 5 RMSNorm of LlamaForCausalLM"
        in caplog.text
    )


def test_none_asks_for_nothing(library: Any) -> None:
    model = made(FAMILIES["llama"]())
    use_kernels(model, "none", CUDA)
    assert not any("forward" in vars(module) for module in model.modules())


WRONG: dict[str, Callable[[Functions], Functions]] = {
    "RMSNorm": lambda right: Functions(lambda *given: 1.01 * right.rms_norm(*given), right.silu_mul, right.rotate),
    "SwiGLU": lambda right: Functions(right.rms_norm, lambda gate, up: gate * up, right.rotate),
    "rotary embedding": lambda right: Functions(
        right.rms_norm, right.silu_mul, lambda query, key, *turns: (query, key)
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_computes_something_else_is_found(library: Any, name: str) -> None:
    assert kernels._different(of_library(), torch.device("cpu")) == []
    assert kernels._different(WRONG[name](of_library()), torch.device("cpu")) == [name]


def test_a_kernel_that_does_not_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Functions:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "of_library", broken)
    told = kernels._wrong.__wrapped__("cpu")
    assert told is not None
    assert "liger-kernel does not run here: " in told
    assert "Failed to find C compiler" in told
    assert told.endswith("or set model.kernels=none")


# Memory


def test_the_trace_keeps_what_the_kernels_keep(library: Any) -> None:
    assert liger_on_cpu.kept(of_library()) == liger_on_cpu.kept(of_trace())


def test_less_memory_is_predicted_with_kernels() -> None:
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    config = hf.Qwen3Config(**sizes)

    def activations(chosen: Any) -> int:
        options = PassOptions(
            source=ModelSource(path="tiny", dtype="bfloat16", kernels=chosen),
            workload=Workload(conversations=4, tokens=64, prompt_tokens=16),
            micro_batch_tokens=256,
            mixed=False,
            on_gpu=True,
            on_ranks=False,
        )
        return traced_pass(options, config).activations

    assert activations("liger") < 0.75 * activations("none")
