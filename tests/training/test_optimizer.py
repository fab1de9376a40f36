"""Optimizers by name, and what they keep of bfloat16 weights, against plain formulas in float64."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from turnwise.config.recipe import checked
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.algorithm import OptimizationSection, OptimizerSection
from turnwise.training.optimizer import Optimizer, _rounded_at_random

SHAPES = ((64, 96), (130,), (70, 80))


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def stepped(optimizer: Optimizer, steps: range, lr: float = 1e-3) -> list[torch.Tensor]:
    for step in steps:
        optimizer.zero_grad()
        own = [gradient.to(optimizer.parameters[0].dtype) for gradient in gradients(step)]
        optimizer.add_gradients([gradient.clone() for gradient in own])
        optimizer.step(lr)
    return [parameter.detach().clone() for parameter in optimizer.parameters]


def adamw(steps: int, lr: float, config: OptimizationSection) -> list[torch.Tensor]:
    """AdamW with clipping of the gradient's norm, in float64, from the formula."""
    weights = [parameter.detach().double() for parameter in parameters(torch.bfloat16)]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    (beta1, beta2) = config.betas
    for step in range(steps):
        own = [gradient.double() for gradient in gradients(step)]
        norm = sum(float((gradient**2).sum()) for gradient in own) ** 0.5
        own = [gradient * min(1.0, config.max_grad_norm / norm) for gradient in own]
        for place, gradient in enumerate(own):
            first[place] = beta1 * first[place] + (1 - beta1) * gradient
            second[place] = beta2 * second[place] + (1 - beta2) * gradient**2
            of_first, of_second = first[place] / (1 - beta1 ** (step + 1)), second[place] / (1 - beta2 ** (step + 1))
            weights[place] *= 1 - lr * config.weight_decay
            weights[place] -= lr * of_first / (of_second.sqrt() + 1e-8)
    return weights


CONFIG = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0)


def test_float32_weights_get_the_steps_of_torchs_adamw_bit_by_bit() -> None:
    own = stepped(Optimizer(parameters(torch.float32), CONFIG), range(3))
    plain = parameters(torch.float32)
    reference = torch.optim.AdamW(plain, lr=1e-3, weight_decay=0.1)
    for step in range(3):
        for parameter, gradient in zip(plain, gradients(step), strict=True):
            parameter.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(plain, 5.0)
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(own, plain, strict=True))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("float32", 0.5), ("kahan", 0.6), ("stochastic_rounding", 1.1)],
    ids=lambda value: str(value),
)
def test_bfloat16_weights_follow_the_formula_in_spite_of_small_steps(kind: Any, tolerance: float) -> None:
    """To half a unit in the last place of bfloat16 with a copy; by random rounding, to about one on average."""
    config = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0, optimizer=OptimizerSection(master_weights=kind))
    optimizer = Optimizer(parameters(torch.bfloat16), config)
    lr = (
        1e-3 if kind == "stochastic_rounding" else 1e-4
    )  # rounding at random is noise, which must be small beside the steps
    own, exact = stepped(optimizer, range(20), lr), adamw(20, lr, config)
    start = [parameter.detach() for parameter in parameters(torch.bfloat16)]
    for weight, reference, before in zip(own, exact, start, strict=True):
        unit = torch.exp2(torch.floor(torch.log2(reference.abs().clamp_min(1e-3))) - 7)
        off = ((weight.double() - reference) / unit).abs()
        if kind == "stochastic_rounding":
            moved = (reference - before.double()).flatten()
            own_moved = (weight.double() - before.double()).flatten()
            assert float(own_moved @ moved / (moved @ moved)) == pytest.approx(1.0, abs=4 * 2.6 / len(moved) ** 0.5)
        else:
            assert float(off.quantile(0.99)) < tolerance
    sizes = {"float32": sum(p.numel() for p in start), "kahan": 0, "stochastic_rounding": 0}
    assert sum(master.numel() for master in optimizer.masters) == sizes[kind]


def test_without_master_weights_small_steps_are_lost() -> None:
    optimizer = Optimizer(
        parameters(torch.bfloat16), OptimizationSection(optimizer=OptimizerSection(master_weights="none"))
    )
    own, start = stepped(optimizer, range(3), lr=1e-6), parameters(torch.bfloat16)
    large = [
        (weight[before.abs() > 0.1], before[before.abs() > 0.1]) for weight, before in zip(own, start, strict=True)
    ]
    assert all(torch.equal(weight, before) for weight, before in large)


def test_random_rounding_gives_the_value_on_average() -> None:
    value = torch.full((20000,), 1.0 + 0.3 * 2**-7)
    rounded = _rounded_at_random(value, seed=1).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1.0 + 0.3 * 2**-7, abs=2e-4)
    exact = torch.tensor([1.5, -2.25, 0.0])
    assert torch.equal(_rounded_at_random(exact, seed=2).float(), exact)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("kind", ["float32", "kahan", "stochastic_rounding", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_saved_state_continues_exactly(name: Any, kind: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and kind != "float32":
        pytest.skip("refused: no effect")
    config = OptimizationSection(optimizer=OptimizerSection(name=name, master_weights=kind))
    straight = stepped(Optimizer(parameters(dtype), config), range(4), lr=1e-2)
    first = Optimizer(parameters(dtype), config)
    halfway = stepped(first, range(2), lr=1e-2)
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    second = Optimizer([torch.nn.Parameter(weight) for weight in halfway], config)
    second.load_state(torch.load(file, weights_only=True))
    resumed = stepped(second, range(2, 4), lr=1e-2)
    assert all(torch.equal(one, other) for one, other in zip(resumed, straight, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(straight, parameters(dtype), strict=True))


def test_eight_bits_and_adafactor_keep_less_state() -> None:
    def state_bytes(name: Any) -> int:
        optimizer = Optimizer(parameters(torch.float32), OptimizationSection(optimizer=OptimizerSection(name=name)))
        stepped(optimizer, range(1))
        values = [value for state in optimizer.state()["optimizer"]["state"].values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))

    full = state_bytes("adamw")
    assert state_bytes("adamw_8bit") < 0.6 * full  # small tensors keep 32 bits, and each tensor has two tables of 1 KB
    assert state_bytes("adafactor") < 0.1 * full


def test_eight_bits_stay_close_to_the_formula() -> None:
    config = OptimizationSection(weight_decay=0.1, max_grad_norm=5.0, optimizer=OptimizerSection(name="adamw_8bit"))
    own, exact = stepped(Optimizer(parameters(torch.bfloat16), config), range(5)), adamw(5, 1e-3, config)
    for weight, reference, before in zip(own, exact, parameters(torch.bfloat16), strict=True):
        moved, own_moved = reference - before.detach().double(), weight.double() - before.detach().double()
        assert float((own_moved * moved).sum() / (moved**2).sum()) == pytest.approx(1.0, abs=0.2)


def tree(section: str, **changes: Any) -> dict[str, Any]:
    model = {"path": "m", **changes.pop("model", {})}
    return {"model": model, "data": {"train": "rows.jsonl"}, section: changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"name": "adafactor"}, "betas": [0.5, 0.9]},
            "betas has no effect with optimizer.name=adafactor",
        ),
        ({"optimizer": {"master_weights": "kahan"}}, "master_weights=kahan has no effect, because all trained weights"),
        (
            {"optimizer": {"master_weights": "none"}, "model": {"dtype": "bfloat16", "lora": {"rank": 4}}},
            "master_weights=none has no effect, because all trained weights",
        ),
        ({"optimizer": {"offload": "cpu"}, "model": {"device": "cpu"}}, "offload=cpu has no effect"),
    ],
)
@pytest.mark.parametrize("section", ["train", "sft"])
def test_options_without_effect_are_refused(section: str, changes: dict[str, Any], message: str) -> None:
    config = checked(tree(section, **dict(changes)), source="recipe")
    with pytest.raises(ConfigError, match=message):
        (refuse_without_effect if section == "train" else refuse_sft_without_effect)(config)


def test_offload_of_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model is on the CPU"):
        Optimizer(parameters(torch.float32), OptimizationSection(optimizer=OptimizerSection(offload="cpu")))


def test_the_optimizer_of_fine_tuning_is_that_of_the_recipe(tmp_path: Path) -> None:
    options = {"name": "adafactor", "master_weights": "kahan", "offload": "cpu"}
    own = checked(tree("sft", optimizer=options), source="recipe").sft.optimizer
    assert (own.name, own.master_weights, own.offload) == ("adafactor", "kahan", "cpu")
