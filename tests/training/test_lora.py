"""LoRA: the engine samples from the adapter, checkpoints hold it, peft reads it, and a run with it resumes exactly."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.recipes import save_recipe
from support.tiny import save_model, tiny_model
from test_train import lines, run, timeless
from training.test_batch import group
from turnwise.cli import main
from turnwise.config.recipe import checked
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError, RunError
from turnwise.models.loading import ModelSource, load_model
from turnwise.models.lora import add_adapter, without_adapter
from turnwise.options.algorithm import LoraSection, PpoClip
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Sampling

LORA = ("model.lora.rank=4", "model.lora.alpha=16")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.02},
        loss={"kl_coef": 0.1},
        deterministic=True,
    )


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_a_run_trains_the_adapter_samples_from_it_saves_it_and_resumes_exactly(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel  # torch.distributed and more: a second of each process that collects this file

    made = run(recipe, *LORA, f"output={tmp_path / 'straight'}")
    metrics = lines(tmp_path / "straight" / "metrics.jsonl")
    assert max(line["ratio/max_deviation"] for line in metrics) < 1e-4
    assert metrics[0]["kl"] == 0.0  # a new adapter changes nothing
    assert metrics[2]["kl"] > 1e-5  # the reference is the model without the adapter
    trained = made.learner.model  # type: ignore[attr-defined]

    run(recipe, *LORA, "train.steps=2", f"output={tmp_path / 'parts'}")
    run(recipe, *LORA, "resume=auto", f"output={tmp_path / 'parts'}")
    assert timeless(lines(tmp_path / "parts" / "metrics.jsonl")) == timeless(metrics)

    checkpoint = tmp_path / "straight" / "checkpoint"
    assert not list(checkpoint.glob("model*.safetensors"))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = trained(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model)
        plain = base(ids).logits
        of_peft = PeftModel.from_pretrained(base, checkpoint)(ids).logits
        of_turnwise = load_model(ModelSource(path=str(checkpoint), device="cpu"))(ids).logits
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(of_peft, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_turnwise, expected, atol=1e-4, rtol=1e-4)

    assert main(["merge", str(tmp_path / "straight"), "--out", str(tmp_path / "merged")]) == 0
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert main(["merge", str(tmp_path / "straight"), "--out", str(tmp_path / "merged")]) == 1
    assert main(["merge", str(model), "--out", str(tmp_path / "nothing")]) == 1

    rollout = ["rollout", str(recipe), f"model.path={checkpoint}", "rollout.max_rows=1", "--out", str(tmp_path / "out")]
    assert main(rollout) == 0
    assert main(["show", str(tmp_path / "straight")]) == 0
    capsys.readouterr()
    assert main(["doctor", str(checkpoint)]) == 0
    assert "log-probs" in capsys.readouterr().out


def test_other_base_weights_do_not_resume(recipe: Path, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    save_model(own)
    run(recipe, *LORA, f"model.path={own}", "train.steps=1")
    save_model(own, seed=1)
    with pytest.raises(RunError, match=r"holds the adapter only, and the weights in model.path=.*changed"):
        run(recipe, *LORA, f"model.path={own}", "train.steps=2", "resume=auto")


def learner(model: object, **loss: float) -> LocalLearner:
    return LocalLearner(model, sampling=Sampling(), loss=make_loss(PpoClip(**loss)), threads=1)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_only_the_adapter_is_trained_and_the_reference_shares_the_base_weights(options: dict[str, object]) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    add_adapter(model, LoraSection(rank=4, alpha=8.0, **options))  # type: ignore[arg-type]
    one = learner(model, kl_coef=0.5)
    first = asyncio.run(one.update([pack(group())], lr=1e-2))
    second = asyncio.run(one.update([pack(group())], lr=1e-2))
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert second.kl > 1e-4
    base = without_adapter(model)
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in base.parameters())
    assert one.base_fingerprint() == learner(tiny_model()).fingerprint()
    scaled = one.model.model.layers[0].self_attn.q_proj.scaling["default"]
    assert scaled == (8.0 / 4**0.5 if options.get("rslora") else 8.0 / 4)


def test_an_adapter_on_bfloat16_weights_is_float32() -> None:
    model = tiny_model().to(torch.bfloat16)
    add_adapter(model, LoraSection(rank=4, alpha=8.0))
    one = learner(model)
    asyncio.run(one.update([pack(group())], lr=1e-2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert all(master is parameter for master, parameter in zip(one._optimizer.masters, trained, strict=True))


def test_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has no linear layer 'qproj'; did you mean 'q_proj'\?; it has .*down_proj.*q_proj"
    ):
        add_adapter(tiny_model(), LoraSection(rank=4, alpha=8.0, target_modules=["qproj"]))
    with pytest.raises(ConfigError, match="both the embedding and the output layer"):
        add_adapter(tiny_model(), LoraSection(rank=4, alpha=8.0, target_modules=["lm_head"]))


def test_an_adapter_on_the_output_layer_gets_its_gradient_in_chunks() -> None:
    from training.test_forward import both

    model = tiny_model(tie_word_embeddings=False)
    add_adapter(model, LoraSection(rank=4, alpha=8.0, target_modules=["lm_head", "q_proj"]))
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.normal_()
    for expected, actual in zip(*both(model, entropy=True), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_options_of_an_adapter_without_rank_are_refused(model: Path) -> None:
    tree = {"model": {"path": str(model), "lora": {"alpha": 8}}, "data": {"train": "rows.jsonl"}}
    with pytest.raises(ConfigError, match=r"model.lora.alpha has no effect without an adapter: set model.lora.rank"):
        refuse_without_effect(checked(tree, source="recipe"))
    with pytest.raises(ConfigError, match=r"lora_rank; it is called model.lora.rank here"):
        checked({**tree, "lora_rank": 8}, source="recipe")
