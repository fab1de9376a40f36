"""liger-kernel on a CPU, by Triton's interpreter: `python -m support.liger_on_cpu FAMILY...` in the folder of the tests.

Prints, for each family of `training.test_tree`, how far the learner's pass with the kernels is from the pass without, as a line
of JSON: over conversations with common prefixes, which are packed into flat rows. The interpreter must be chosen before Triton is
imported, so this is a program.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from typing import Any

import numpy as np
import torch


def prepare() -> None:
    """Let Triton interpret the kernels. In four places, its interpreter does not do what its compiler does."""
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:  # an argument that is a number has the method `to` in a compiled kernel
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = with_numbers
    to_float = interpreter._convert_float

    def to_nearest(values: Any, source: Any, target: Any, rounding: Any) -> Any:  # it cuts the last bits of float32
        if (source, target) != (language.float32, language.bfloat16):
            return to_float(values, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float32).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = to_nearest
    builder = interpreter.InterpreterBuilder
    compute = builder.binary_op

    def in_float32(
        self: Any, left: Any, right: Any, op: Any
    ) -> Any:  # it computes with the bits of bfloat16 as integers
        if left.dtype.scalar != language.bfloat16:
            return compute(self, left, right, op)
        wide = [self.cast_impl(one, language.float32) for one in (left, right)]
        return self.cast_impl(compute(self, *wide, op), language.bfloat16)

    builder.binary_op = in_float32
    # a function of CUDA's libdevice
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = lambda values: language.rsqrt(values)


def kept(functions: Any) -> int:
    """The bytes that the layers of a Qwen3 in half precision keep for the backward pass, its weights excluded."""
    from training.test_precision import made
    from training.test_tree import FAMILIES
    from turnwise.models.kernels import replace_layers

    model = made(FAMILIES["qwen3"]()).to(torch.bfloat16)
    replace_layers(model, functions)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(torch.arange(40)[None], use_cache=False).logits
    assert result.requires_grad
    return sum(found.values())


def differences(family: str, variant: str) -> dict[str, float]:
    """The largest difference of log-probabilities, and of gradients relative to the largest one, with and without kernels."""
    from training.test_precision import made
    from training.test_tree import FAMILIES, random_trajectories
    from turnwise.models.kernels import of_library, replace_layers
    from turnwise.models.loading import recompute_layers
    from turnwise.models.lora import add_adapter
    from turnwise.options.algorithm import LoraSection
    from turnwise.training.batch import pack
    from turnwise.training.forward import Forward, shares_prefixes
    from turnwise.types import Sampling

    torch.manual_seed(0)
    model = made(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # new norms have weights of 1 (or 0), with which a wrong gradient can look right
                parameter.uniform_(0.5, 1.5)
    if variant == "LoRA":
        add_adapter(model, LoraSection(rank=4, alpha=8), seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    if variant == "checkpointing":
        recompute_layers(model)
    if variant == "bfloat16":
        model = model.to(torch.bfloat16)
    exact = copy.deepcopy(model).double() if variant == "bfloat16" else None
    fused = copy.deepcopy(model)
    counts = replace_layers(fused, of_library())
    assert list(fused.state_dict()) == list(model.state_dict())

    def passed(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert shares_prefixes(one, "always", refusal="needed here")
        forward = Forward(one, Sampling(), autocast=variant == "autocast")
        logprobs: list[torch.Tensor] = []
        for micro in pack(random_trajectories(3), micro_batch_tokens=60).micro_batches:
            logprob_N, _ = forward.logprobs(micro)
            (logprob_N * micro.targets.advantage_N).sum().backward()
            logprobs.append(logprob_N.detach())
        gradients = [parameter.grad.flatten() for parameter in one.parameters() if parameter.grad is not None]
        return torch.cat(logprobs).double(), torch.cat(gradients).double()

    (plain_N, plain_P), (fused_N, fused_P) = passed(model), passed(fused)
    found = {
        "logprobs": float((plain_N - fused_N).abs().max()),
        "gradients": float((plain_P - fused_P).abs().max() / plain_P.abs().max()),
        **{f"{name} replaced": float(count) for name, count in counts.items()},
    }
    if exact is not None:  # in lower precision, what counts is how far each is from the model in float64
        exact_N, exact_P = passed(exact)
        for name, values_N, values_P in (("plain", plain_N, plain_P), ("fused", fused_N, fused_P)):
            found[f"{name} logprobs from float64"] = float((values_N - exact_N).square().mean().sqrt())
            found[f"{name} gradients from float64"] = float((values_P - exact_P).norm() / exact_P.norm())
    return found


def main() -> None:
    """See the module."""
    prepare()  # before any library imports Triton
    from turnwise.models.kernels import of_library, of_trace

    memory = {"kept": kept(of_library()), "kept by the trace": kept(of_trace())}
    for case in sys.argv[1:]:
        family, _, variant = case.partition(":")
        print(json.dumps({"case": case, **differences(family, variant), **memory}), flush=True)


if __name__ == "__main__":
    main()
