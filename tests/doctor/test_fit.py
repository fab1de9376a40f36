"""What fits on a card: numbers that a recipe leaves open, the recipe of `turnwise init`, and options with which a recipe fits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import hybrids, mixtures
from support.qwen3 import QWEN3, save_config
from support.tiny import tiny_model
from turnwise.assembly import model_source
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor import fit, memory, what_fits
from turnwise.doctor.check import Check
from turnwise.doctor.examine import examine
from turnwise.doctor.fit import (
    USABLE,
    WAYS,
    WAYS_OF,
    choose,
    fitted,
    fitted_to_card,
    learning_rate,
    starter,
    starter_check,
    starter_lines,
)
from turnwise.doctor.memory import SERVER_BYTES, PassOptions, Workload, changed, empty_model, predict, read_model_config
from turnwise.doctor.what_fits import fit_check
from turnwise.engines.remote.server_process import ServerCommand, ServerProcess, installed_version
from turnwise.errors import ConfigError, EngineError
from turnwise.models import device
from turnwise.models.device import GpuMemory, known_dtype
from turnwise.options.engines import LocalEngineSection
from turnwise.options.schema import Config
from turnwise.starter import write_project
from turnwise.terminal import report

ROOT = Path(__file__).parents[2]
WORK = Workload(conversations=64, tokens=512)


def config(**sections: Any) -> Config:
    model = {"path": "m", "device": "cuda", **sections.pop("model", {})}
    return Config.model_validate({"model": model, "data": {"train": "rows.jsonl"}, **sections})


@pytest.mark.slow
def test_what_a_recipe_leaves_open_is_computed_for_the_card() -> None:
    shape = tiny_model(vocabulary=2000).config
    tokens = []
    for gib in (0.71, 0.8):
        known = fitted(config(), shape, WORK, section="train", gib=gib)
        assert known.train.micro_batch_tokens is not None
        tokens.append(known.train.micro_batch_tokens)
        update = predict(known, shape, WORK, on_update=True, card_gib=gib)
        needed = sum(part.bytes for part in update.parts if part.name != "KV cache") / 2**30
        assert needed < 1.001 * USABLE * gib
        assert known.train.micro_batch_tokens == 16384 or needed > 0.97 * USABLE * gib
        embedded = known.engine.embedded
        assert embedded is not None
        assert embedded.memory_gb is not None
        assert embedded.memory_gb <= gib - 0.5  # the program
    assert tokens[0] < tokens[1]
    assert fitted(known, shape, WORK, section="train", gib=4.0) == known  # the numbers of the recipe stay
    on_cpu = config(model={"device": "cpu"})
    assert fitted(on_cpu, shape, WORK, section="train", gib=4.0) is on_cpu
    too_small = fitted(config(), shape, WORK, section="train", gib=0.5)
    assert too_small.train.micro_batch_tokens == max(WORK.tokens, 512)
    assert too_small.engine == config().engine


AWAY: dict[str, dict[str, Any]] = {
    "stays": {},
    "sampling": {"offload": "sampling"},
    "cpu": {"offload": "cpu"},
    "kahan": {"offload": "sampling", "master_weights": "kahan"},
}


@pytest.mark.parametrize(
    ("optimizer", "sections", "passes", "step", "sampling"),
    [
        ("stays", {}, 12, 12, 12),
        ("cpu", {}, 0, 0, 0),
        ("sampling", {}, 0, 12, 0),
        ("kahan", {}, 0, 10, 0),
        ("sampling", {"train": {"minibatches": 2}}, 12, 12, 0),  # it is there since the first step
        ("sampling", {"train": {"ppo_epochs": 2}}, 12, 12, 0),
    ],
)
def test_what_only_steps_need_is_counted_where_it_is(
    optimizer: str, sections: dict[str, Any], passes: int, step: int, sampling: int
) -> None:
    shape = tiny_model(vocabulary=300).config
    train = {**sections.get("train", {}), "optimizer": AWAY[optimizer], "micro_batch_tokens": 512}
    recipe = config(model={"dtype": "bfloat16"}, train=train)
    facts = memory._without_pass(recipe, shape)
    during: tuple[memory.Part, ...] = ("passes", "step", "sampling")
    held = [
        {part.name: part.bytes / facts.trained_count for part in memory._held(recipe, facts, "train", one)}
        for one in during
    ]
    assert [parts["optimizer"] for parts in held] == [passes, step, sampling]
    assert [parts["gradients"] for parts in held] == [2, 2, 0]
    update, of_sampling = memory.phases(recipe, shape, WORK, card_gib=24.0)
    names = {part.name: part.bytes / facts.trained_count for part in update.parts}
    assert names.get("optimizer", 0) == (step if "temporary tensors of the optimizer" in names else passes)
    assert "optimizer" not in {part.name for part in of_sampling.parts} or sampling > 0
    with_critic = config(
        model={"dtype": "bfloat16"}, train=train, credit={"name": "gae"}, engine={"name": "vllm", "sleep": True}
    )
    of_critic = [memory.held_bytes(with_critic, shape, "train", one) / facts.trained_count for one in during]
    # its weights and gradients, and its optimizer
    assert of_critic[1] - sum(held[1].values()) == pytest.approx(2 + 2 + step)
    assert of_critic[2] - sum(held[2].values()) == pytest.approx(2 + 2 + sampling)


@pytest.mark.parametrize("section", ["train", "sft"])
def test_state_that_leaves_the_gpu_is_offered_where_the_run_takes_turns(section: str) -> None:
    def offered(**sections: Any) -> list[Any]:
        ways = what_fits._methods(config(**sections), section)
        return [way.get(f"{section}.optimizer.offload") for way in ways if "model.lora.rank" not in way]

    with_it = [None, None, "sampling", None, "sampling", None, None, "sampling"]  # beside Kahan: 8 bits
    assert offered() == (with_it if section == "train" else [None] * len(with_it))
    assert set(offered(model={"lora": {"rank": 4}})) == {None}
    assert set(offered(**{section: {"optimizer": {"offload": "cpu"}}})) == {None}


@pytest.mark.parametrize("section", ["train", "sft"])
def test_what_a_recipe_has_is_not_offered(section: str) -> None:
    has = config(model={"gradient_checkpointing": True})
    ways = list(what_fits._methods(has, section))
    assert any(f"{section}.optimizer.name" in way for way in ways)
    assert not any("model.gradient_checkpointing" in way for way in ways)


def test_a_peak_close_to_the_whole_of_a_gpu_is_a_note() -> None:
    def status(gib: float, *, gpu: bool = True) -> str:
        return memory.compared("peak", gib, 24.0, [], gpu=gpu).status

    assert [status(gib) for gib in (24 * USABLE, 24 * USABLE + 0.1, 24.1)] == ["ok", "note", "fail"]
    assert [status(gib, gpu=False) for gib in (24.0, 24.1)] == ["ok", "fail"]
    assert "more than 92% of 24.0 GiB" in memory.compared("peak", 23.0, 24.0, [], gpu=True).text


@pytest.mark.slow
def test_a_note_and_a_failure_say_the_numbers_that_were_computed(smaller: str) -> None:
    """Also where not even the smallest micro-batch fits, and its peak is the one that is compared."""
    given, shape = recipe(smaller), read_model_config(smaller)
    work = memory.workload_of(given, shape, "train")
    check = fit_check(given, smaller, section="train", memory_gb=8.0)
    known = fitted(given, shape, work, section="train", gib=8.0)
    assert known.engine.embedded is not None
    assert check.status == "ok"
    assert dict(check.details)["computed"] == (
        f"train.micro_batch_tokens={known.train.micro_batch_tokens}, engine.memory_gb={known.engine.embedded.memory_gb}"
    )
    least = changed(given, ["train", "micro_batch_tokens"], work.tokens)
    peak = predict(least, shape, work, card_gib=0.7).gib
    fails = fit_check(given, smaller, section="train", memory_gb=0.7)
    assert f"predicted peak of a training step: {peak:.1f} GiB" in fails.text
    assert f"0.7 GiB, with the smallest micro-batch (train.micro_batch_tokens={work.tokens}): " in fails.text
    assert "with the smallest" not in fit_check(least, smaller, section="train", memory_gb=0.7).text
    close = predict(least, shape, work, card_gib=1.5).gib / 0.95
    note = fit_check(
        changed(least, ["engine"], LocalEngineSection(memory_gb=2.0)), smaller, section="train", memory_gb=close
    )
    assert note.status == "note"
    assert fit_check(applied(least, note), smaller, section="train", memory_gb=close).status == "ok"


@pytest.mark.slow
def test_a_given_micro_batch_needs_what_the_same_one_needs_that_was_computed() -> None:
    """Also if it is no multiple of the longest conversation: packing fills it with shorter ones."""
    shape, work, gib = tiny_model(vocabulary=2000).config, replace(WORK, tokens=700), 0.64
    needs = fit._of_process(config(), shape, work, "train", gib)
    tokens, update = fit._micro_batch(config(), work, "train", gib, needs)
    assert tokens is not None
    assert 700 < tokens < 16384
    assert tokens % 700 > 256
    always = memory.held_bytes(config(), shape, "train")
    given = config(train={"micro_batch_tokens": tokens})
    known, needed = fit._micro_batch(given, work, "train", gib, needs)
    assert known == tokens
    assert needed - always == pytest.approx(update - always, rel=0.02)
    # what fits by whole conversations only is refused
    whole = predict(given, shape, replace(work, equal=True), on_update=True, card_gib=gib).gib
    check = memory.peak_check(given, shape, work, section="train", limit=whole + 0.001, card_gib=gib)
    assert check.status == "fail"


@pytest.mark.slow
def test_a_micro_batch_stays_in_bounds_where_the_optimizer_needs_more_than_a_short_pass() -> None:
    """Then further tokens add more than the first ones, and a line through two short passes ends above the limit."""
    shape, work, limit = tiny_model(vocabulary=2000).config, replace(WORK, tokens=512), 9000 * 2**20
    shape.hidden_size, shape.intermediate_size = 1024, 2**15
    recipe = config(model={"dtype": "bfloat16"})
    gib = limit / 2**30 / USABLE
    needs = fit._of_process(recipe, shape, work, "train", gib)
    tokens, update = fit._micro_batch(recipe, work, "train", gib, needs)
    short = (memory.changed(recipe, ["train", "micro_batch_tokens"], number) for number in (512, 1024))
    one, two = map(needs.update, short)
    assert tokens is not None
    assert one + (two - one) * (tokens - 512) / 512 < 0.95 * update
    assert 0.97 * limit < update <= limit


@pytest.mark.slow
def test_a_run_computes_with_the_memory_that_others_leave(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = GpuMemory("A card", 24 * 2**30, 2 * 2**30)
    for module in (fit, device):
        monkeypatch.setattr(module, "sees_gpu", lambda: True)
        monkeypatch.setattr(module, "gpu_memory", lambda device: card)
    recipe = config(limits={"context": 256}, model={"dtype": "float32"})
    known, notes = fitted_to_card(recipe, str(model), section="train")
    assert known.engine.embedded is not None
    assert 1.0 < (known.engine.embedded.memory_gb or 0) < 2.0
    assert "A card with 24.0 GiB, of which other processes use 22.0" in notes[0]
    assert f"train.micro_batch_tokens={known.train.micro_batch_tokens}" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "least"), [("8B", 8.4)])
def test_a_card_that_is_too_small_is_told_what_is_needed(size: str, least: float, tmp_path: Path) -> None:
    path = str(save_config(tmp_path / "model", size))
    with pytest.raises(
        ConfigError, match="does not fit on a GPU with 5 GiB: even an adapter on weights in 4 bits"
    ) as raised:
        fit.starter_plan(path, 5.0)
    assert float(str(raised.value).split("needs ")[1].split(" GiB")[0]) == pytest.approx(least, rel=0.1)
    with pytest.raises(ConfigError, match="--gpu needs a number on a machine whose GPU cannot be used"):
        fit.starter_plan(path, None)
    with pytest.raises(ConfigError, match=r"^--model .*: no model configuration could be loaded from"):
        fit.starter_plan(str(tmp_path), 24.0)
    with pytest.raises(ConfigError, match=r"^--model runs/nothing: there is no model directory"):
        fit.starter_plan("runs/nothing", 24.0)


def test_weights_are_counted_once_on_a_gpu() -> None:
    """Products read transposed views of weights; they make no copies."""
    shape = tiny_model(vocabulary=300).config
    shape.intermediate_size = 2**17
    recipe = config(model={"lora": {"rank": 2, "target_modules": ["q_proj"]}}, train={"micro_batch_tokens": 2})
    found = predict(recipe, shape, Workload(conversations=1, tokens=2), on_update=True, card_gib=24.0)
    bytes_of = {part.name: part.bytes for part in found.parts}
    assert bytes_of["weights"] > 2**25
    assert bytes_of.get("activations", 0) + bytes_of["logits and other temporary tensors"] < bytes_of["weights"] / 4


_LORA: dict[str, Any] = {"lora": {"rank": 4}}
_METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": _LORA,
    "LoRA of the embedding": {"lora": {"rank": 4, "target_modules": ["embed_tokens", "q_proj"]}},
    "QLoRA": _LORA | {"quantization": {"bits": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointing", "tied", "device"),
    [
        ("LoRA", True, True, "cuda"),  # by one and two layers, the peak would be 13 % too high with six
        ("all weights", False, False, "cuda"),
        ("all weights", True, True, "cuda"),
        ("LoRA", False, True, "cuda"),
        ("LoRA", True, False, "cuda"),
        ("LoRA", True, True, "cpu"),
        ("LoRA of the embedding", True, False, "cuda"),
        ("QLoRA", True, True, "cuda"),
        ("QLoRA", False, False, "cuda"),
    ],
)
def test_alike_layers_count_like_all_of_them(method: str, checkpointing: bool, tied: bool, device: str) -> None:
    """The pass of a model of four layers, by those of two other depths, and by all four."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 16}
    shape = tiny_model(num_hidden_layers=4, tie_word_embeddings=tied, **sizes).config
    shape.architectures = ["LlamaForCausalLM"]  # in each config.json: a list of one entry, and not of layers
    dtype = "bfloat16" if device == "cuda" else "float32"
    source = model_source(
        config(model={"device": device, "dtype": dtype, "gradient_checkpointing": checkpointing, **_METHODS[method]})
    )
    work = Workload(conversations=1, tokens=256)
    options = PassOptions(
        source=source, workload=work, micro_batch_tokens=256, mixed=False, on_gpu=device == "cuda", on_ranks=False
    )
    model = empty_model(source, shape)
    assert len(set(memory._kinds_of_layers(model, shape))) == 1
    assert memory._by_kinds(memory._facts_of(source, shape), options, shape, large=True) is not None
    activations, peak = memory._traced_bytes(model, options, large=True)
    trace = memory._trace(options, shape)
    assert trace.activations == pytest.approx(activations, rel=0.001)
    assert trace.peak - memory._facts_of(source, shape).dequantized == pytest.approx(peak, rel=0.001)


_PATTERNS = {
    "lfm2": ["conv", "conv", "full_attention"] * 2,
    "qwen3_5": [*["linear_attention"] * 3, "full_attention"] * 2,
    "gpt_oss": ["sliding_attention", "full_attention"] * 3,
}


def with_layers(family: str, layers: int, **options: Any) -> Any:
    shape = {**hybrids.CONFIGS, **mixtures.CONFIGS}[family]()
    for name, value in {"num_hidden_layers": layers, **options}.items():
        setattr(shape, name, value)
    return shape


@pytest.mark.parametrize(
    ("family", "method", "checkpointing"),
    [
        ("lfm2", "all weights", False),
        pytest.param("lfm2", "LoRA", False, marks=pytest.mark.slow),
        pytest.param("qwen3_5", "LoRA", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "LoRA", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "all weights", True, marks=pytest.mark.slow),
    ],
)
def test_layers_of_two_kinds_count_like_all_of_them(family: str, method: str, checkpointing: bool) -> None:
    """The pass of a model with layers of two kinds, by one of each kind and one more, and by all of them."""
    shape = with_layers(family, len(_PATTERNS[family]), layer_types=_PATTERNS[family])
    model = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing, **_METHODS[method]}
    source = model_source(config(model=model))
    work = Workload(conversations=1, tokens=256)
    options = PassOptions(
        source=source, workload=work, micro_batch_tokens=256, mixed=False, on_gpu=True, on_ranks=False
    )
    facts = memory._facts_of(source, shape)
    assert len(set(facts.kinds)) == 2
    expected = memory._traced_bytes(empty_model(source, shape), options, large=False)
    assert memory._by_kinds(facts, options, shape, large=False) == pytest.approx(expected, rel=0.001)


def test_layers_whose_kind_depends_on_their_number_are_all_traced() -> None:
    """The first layers of DeepSeek V3 are dense (`first_k_dense_replace`): fewer layers would be others."""
    shape = with_layers("deepseek_v3", 6, first_k_dense_replace=2)
    source = model_source(config(model={"device": "cuda"}))
    work = Workload(conversations=1, tokens=64)
    options = PassOptions(source=source, workload=work, micro_batch_tokens=64, mixed=False, on_gpu=True, on_ranks=False)
    facts = memory._facts_of(source, shape)
    assert len(set(facts.kinds)) == 2
    assert memory._by_kinds(facts, options, shape, large=False) is None


def test_ways_replace_each_other_and_are_recipes() -> None:
    recipe = config(model={"lora": {"rank": 4}, "gradient_checkpointing": True})
    recipe = fit.with_way(recipe, EVERY_WAY["all weights, 8 bits, state away"])
    assert (recipe.model.lora.rank, recipe.train.optimizer.name) == (None, "adamw_8bit")
    full, *_, quantized = (fit.with_way(recipe, way) for way in WAYS)
    assert full.train.optimizer == config().train.optimizer
    assert (full.model.lora.rank, full.model.gradient_checkpointing, full.model.dtype) == (None, False, "bfloat16")
    assert (quantized.model.quantization.bits, quantized.model.lora.rank) == (4, 32)
    assert choose(recipe, tiny_model().config, WORK, gib=0.5) is None


@pytest.mark.parametrize("kind", fit.WAYS_OF)
def test_the_last_way_of_a_kind_needs_the_least_memory(kind: fit.Trained) -> None:
    shape = tiny_model().config
    needs = [fit.least_gib(config(), shape, WORK, way) for way in WAYS_OF[kind]]
    assert needs[-1] == min(needs)
    trains_adapter = {"model.lora.rank" in way.options for way in WAYS_OF[kind]}
    assert trains_adapter == {kind != "all"}
    assert {"model.quantization.bits" in way.options for way in WAYS_OF[kind]} == {kind == "qlora"}


def test_a_recipe_with_an_adapter_says_what_was_tried_of_all_weights() -> None:
    def values(ways: Sequence[fit.Way]) -> set[str]:
        """The options of the ways, as the text names them."""
        found = {f"{name.rpartition('.')[2]}: {value}" for way in ways for name, value in way.options.items()}
        return {text.removeprefix("name: ").removesuffix(": True") for text in found}

    tried = [way for way in WAYS if "model.lora.rank" not in way.options]
    further = [way for way in WAYS_OF["all"] if way not in WAYS]
    for way in (EVERY_WAY["LoRA"], EVERY_WAY["QLoRA"]):
        said, _, not_tried = " ".join(fit._why(way, 4096, None)).partition("; `turnwise init")
        assert "fit with conversations of 4,096 tokens: tried for all weights were AdamW" in said
        assert all(value in said for value in values(tried))
        assert all(value in not_tried for value in values(further) - values(tried))
        assert not any(value in not_tried for value in values(tried))
        assert ("nor an adapter" in said) == (way.name == "QLoRA")
        assert fit._why(way, 4096, "lora") == [f"{way.reason} (--train lora)"]  # nothing else was tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "gib", "way"),
    [
        ("all", 24.0, "all weights, 8 bits"),
        ("all", 16.0, "all weights, AdamW's state on the CPU"),
        ("lora", 48.0, "LoRA"),
        ("qlora", 24.0, "QLoRA, no checkpointing"),
        ("qlora", 16.0, "QLoRA"),
    ],
)
def test_what_is_trained_can_be_chosen(
    trained: str, gib: float, way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe fits, also beside a sleeping server, if it names one."""
    path, folder = str(save_config(tmp_path / "model", "1.7B")), tmp_path / "new"
    assert main(["init", str(folder), "--model", path, "--gpu", f"{gib:g}", "--train", trained]) == 0
    assert f"on a GPU with {gib:g} GiB: {way}, predicted peak" in capsys.readouterr().out.replace("\n", " ")
    own = (folder / "recipe.yaml").read_text()
    assert f" (--train {trained})\n" in own
    for text in (own, with_instead(own)):
        (folder / "recipe.yaml").write_text(text)
        recipe, notes = load(folder / "recipe.yaml", ["model.device=cuda"])
        refuse_without_effect(recipe)
        assert notes == []
        for name, value in EVERY_WAY[way].options.items():
            assert fit.value_of(recipe, name.split(".")) == value
        check = fit_check(recipe, path, section="train", memory_gb=gib)
        assert check.status == "ok", check
    assert main(["init", str(tmp_path / "other"), "--model", path, "--train", trained]) == 1
    assert f"--train {trained} chooses what fits into the memory of a GPU, and no GPU is given: add --gpu 24" in (
        " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.slow
def test_what_is_chosen_and_does_not_fit_is_told_what_would(tmp_path: Path) -> None:
    path = str(save_config(tmp_path / "model", "1.7B"))
    said = {}
    for trained, gib in (("all", 8.0), ("lora", 4.2), ("qlora", 2.0)):
        with pytest.raises(ConfigError) as raised:
            fit.starter_plan(path, gib, trained=trained)
        said[trained] = str(raised.value)
    assert "does not fit on a GPU with 8 GiB with --train all: even the training of all weights with" in said["all"]
    least = float(said["all"].split("needs ")[1].split(" GiB")[0])
    assert least == pytest.approx((2 + 2) * 1.72e9 / 2**30 / USABLE, rel=0.15)  # weights and gradients
    assert "Use --train lora, which fits (LoRA, checkpointing, with conversations of 2,048 tokens), a" in said["all"]
    assert "--train lora: even an adapter with checkpointing needs" in said["lora"]
    assert "Use --train qlora, which fits (QLoRA" in said["lora"]
    assert "tokens. Use a smaller model, or several GPUs" in said["qlora"]


def test_learning_rates_fall_with_the_size_and_rise_for_adapters() -> None:
    sizes = (135e6, 600e6, 1.7e9, 4e9, 8e9, 30e9)
    rates = [learning_rate(int(size), adapter=False) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (1e-5, 1e-6)
    assert [learning_rate(int(size), adapter=True) / rate for size, rate in zip(sizes, rates, strict=True)] == [
        pytest.approx(20)
    ] * len(sizes)


@pytest.mark.slow
def test_a_starter_recipe_for_a_model_and_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_SILENT", 0.0)
    path = save_config(tmp_path / "model", "8B")
    assert main(["init", str(tmp_path / "new"), "--model", str(path), "--gpu", "24"]) == 0
    captured = capsys.readouterr()
    printed = captured.out.replace("\n", " ")
    assert captured.err.splitlines() == [
        f"reading {path}",
        *(f"trying {way.name}, with conversations of 4,096 tokens" for way in WAYS[:8]),
        "computing the memory of a step with LoRA, checkpointing",
    ]
    assert "on a GPU with 24 GiB: LoRA, checkpointing" in printed
    assert f"turnwise doctor {path} --recipe recipe.yaml model.device=cuda --memory-gb 24 " in printed
    written = yaml.safe_load((tmp_path / "new" / "recipe.yaml").read_text())
    assert written["model"] | {"path": ""} == {
        "path": "", "dtype": "bfloat16", "lora": {"rank": 32, "alpha": 64}, "gradient_checkpointing": True,
    }  # fmt: skip
    assert written["train"]["lr"] == 2e-5
    assert written["correction"] == {"action": "truncate"}
    recipe = Config.model_validate({**written, "model": {**written["model"], "device": "cuda"}})
    check = fit_check(recipe, str(path), section="train", memory_gb=24.0)
    assert check.status == "ok", check
    assert main(["init", str(tmp_path / "other"), "--gpu", "24"]) == 1


@pytest.mark.slow
def test_a_row_of_the_table_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages have what `make memory-table` computes. The recipe of the row is valid, and the doctor says that it fits."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import memory_table

    monkeypatch.setattr(memory_table, "CARDS", (16,))
    (row,) = memory_table.rows_of("0.6B")
    assert row in (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    (*_, of_model) = memory_table.short([row])
    assert of_model.split(" | ")[1].rstrip(" |") in (ROOT / "docs" / "memory.md").read_text()


EVERY_WAY = {way.name: way for way in (*WAYS, *(way for ways in WAYS_OF.values() for way in ways))}


@pytest.mark.parametrize("way", EVERY_WAY.values(), ids=EVERY_WAY)
def test_recipes_of_all_ways_are_valid(way: fit.Way, tmp_path: Path) -> None:
    """The recipe that `turnwise init --gpu` writes for a way, as `turnwise train` reads it."""
    numbers = config(train={"micro_batch_tokens": 4096}, engine={"name": "local", "memory_gb": 4.8})
    plan = fit.Plan(way, fit.with_way(numbers, way), gib=20.0, parameters=8_000_000_000, rows=8)
    found = fit.Starter(plan, 4096, 8.0, fit.Beside(6.2, 3840))
    write_project(tmp_path / "new", model="m", changes=starter_lines(found, 24.0))
    recipe, notes = load(tmp_path / "new" / "recipe.yaml", ["model.device=cuda"])
    refuse_without_effect(recipe)
    assert notes == []
    text = (tmp_path / "new" / "recipe.yaml").read_text()
    assert "micro_batch_tokens: 4096 # the most with which an update fits into 92% of 24 GiB" in text
    for name, value in way.options.items():
        assert fit.value_of(recipe, name.split(".")) == value
    assert recipe.limits.context == 4096
    assert recipe.train.lr == pytest.approx(learning_rate(plan.parameters, adapter="model.lora.rank" in way.options))


def test_auto_is_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    assert known_dtype(config()) == "bfloat16"
    assert known_dtype(config(model={"device": "cpu"})) == "float32"
    assert known_dtype(config(model={"autocast": True})) == "float32"
    assert known_dtype(config(deterministic=True)) == "float32"
    assert known_dtype(config(cluster={"launcher": "local"})) == "float32"  # all ranks have the same
    assert known_dtype(config(model={"dtype": "float32"})) == "float32"


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, None),
        ({"model": {"dtype": "float32"}}, "set model.autocast=true (float32 weights) or model.dtype=bfloat16"),
        ({"model": {"dtype": "float32", "autocast": True}}, None),
        ({"model": {"dtype": "float32", "device": "cpu"}}, None),
        ({"cluster": "local"}, "set cluster.fsdp.param_dtype=bfloat16 (float32 weights)"),
        ({"cluster": {"launcher": "local", "fsdp": {"param_dtype": "bfloat16"}}}, None),
    ],
)
def test_products_in_float32_on_a_gpu_are_told(
    sections: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    capability = (8, 0)
    monkeypatch.setattr(device, "sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    said = device.slow_products(config(**sections))
    assert said is None if told is None else told in str(said)
    capability = (7, 5)  # it has no products in bfloat16
    assert device.slow_products(config(**sections)) is None


def test_why_a_gpu_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is that of a CPU here; what another build says is given."""
    import torch

    assert device.why_no_gpu() is None  # no driver
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(device, "_DRIVERS", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert "was built for CPUs only" in str(device.why_no_gpu())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides all GPUs" in str(device.why_no_gpu())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    said = "No CUDA GPUs are available"

    def fails() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", fails)
    assert "CUDA_VISIBLE_DEVICES=MIG-1: check that it names GPUs that nvidia-smi -L lists" in str(device.why_no_gpu())
    said = "The NVIDIA driver on your system is too old (found version 11040)."
    told = str(device.why_no_gpu())
    assert "the driver is too old for torch" in told
    assert "CUDA 13.0" in told
    assert "found version 11040" in told


def test_a_slice_of_a_gpu_is_a_gpu_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (3 * 2**30, 5 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    memory = device.gpu_memory("cuda:0")
    assert (memory.total, memory.free) == (5 * 2**30, 4 * 2**30)  # with what this process's allocator keeps
    assert str(memory) == "NVIDIA A100-SXM4-40GB MIG 1g.5gb with 5.0 GiB"


# Options with which a recipe fits: what is printed is applied to the recipe, and the doctor must then say that it
# fits


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a model of 4 layers, whose training of all weights needs 2 GiB."""
    folder = save_config(tmp_path_factory.mktemp("small") / "model", "0.6B")
    (folder / "config.json").write_text(json.dumps({**QWEN3["0.6B"], "num_hidden_layers": 4, "vocab_size": 4000}))
    return str(folder)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with 2 layers, whose passes take a third of the time to predict."""
    folder = save_config(tmp_path_factory.mktemp("smaller") / "model", "0.6B")
    (folder / "config.json").write_text(json.dumps({**QWEN3["0.6B"], "num_hidden_layers": 2, "vocab_size": 4000}))
    return str(folder)


def recipe(path: str, **sections: Any) -> Config:
    model = {"path": path, "device": "cuda", **sections.pop("model", {})}
    tree = {"data": {"train": "rows.jsonl"}, "limits": {"context": 1024}, "train": {"batch_size": 8}, **sections}
    tree["reward"] = {"trajectory": ["length.py:length"]}
    return Config.model_validate({**tree, "model": model})


def printed(check: Check) -> list[tuple[str, Any]]:
    """The options after the last `set` of a check's text."""
    words = check.text.rpartition(": set ")[2].partition(" (")[0].split()
    assert words, check
    return [(name, yaml.safe_load(value)) for name, _, value in (word.partition("=") for word in words)]


def applied(config: Config, check: Check) -> Config:
    for name, value in printed(check):
        config = changed(config, name.split("."), LocalEngineSection() if value == "local" else value)
    return config


GIVEN = {"micro_batch_tokens": 8192}
CACHE = {"name": "local", "memory_gb": 3.0}
SERVER = {"name": "vllm", "devices": [0]}
SETTINGS: dict[str, dict[str, Any]] = {
    "open": {},
    "numbers": {"train": GIVEN, "engine": CACHE},
    "own adapter": {"model": {"lora": {"rank": 8}}, "train": GIVEN, "engine": CACHE},
    "float32": {"model": {"dtype": "float32"}, "train": GIVEN},
    "server": {"engine": SERVER, "train": GIVEN},
    "server's cache": {"engine": SERVER | {"memory_gb": 2.5}},
    "sleeping server": {"engine": {"name": "vllm", "sleep": True, "memory_gb": 9.0}, "train": GIVEN},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        *((name, 1.3) for name in SETTINGS),
        *((name, 2.2) for name in ("own adapter", "server", "sleeping server")),
        *((name, 4.4) for name in ("open", "float32", "server's cache")),
    ],
)
def test_what_is_said_to_fit_fits(name: str, gib: float, small: str) -> None:
    assert_what_is_said_to_fit_fits(name, gib, small)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gib"), [("numbers", 1.3), ("server", 1.3), ("server", 4.4)])
def test_what_is_said_to_fit_a_smaller_model_fits(name: str, gib: float, smaller: str) -> None:
    assert_what_is_said_to_fit_fits(name, gib, smaller)


def assert_what_is_said_to_fit_fits(name: str, gib: float, path: str) -> None:
    config = recipe(path, **SETTINGS[name])
    check = fit_check(config, path, section="train", memory_gb=gib)
    if check.status == "ok":
        return
    other = applied(config, check)
    if gib < 2:  # the process of a server takes as much: instead, the embedded engine
        assert isinstance(other.engine, LocalEngineSection)
    again = fit_check(other, path, section="train", memory_gb=gib)
    assert again.status == "ok", (check, again)
    assert (
        f"step: {check.text.rpartition(' (')[2].partition(' GiB')[0]} GiB" in again.text
    )  # the number that was printed
    assert other.model.lora.rank in (config.model.lora.rank or 32, config.model.lora.rank)


@pytest.mark.slow
def test_the_settings_meet_what_they_are_to_test(small: str) -> None:
    """Numbers of the recipe are given up before anything is learned with less."""
    found = {}
    for name, gib in (("numbers", 2.9), ("numbers", 1.3), ("own adapter", 1.3), ("sleeping server", 4.4)):
        check = fit_check(recipe(small, **SETTINGS[name]), small, section="train", memory_gb=gib)
        found[name, gib] = dict(printed(check))
    assert found["numbers", 2.9].keys() <= {"engine.memory_gb", "train.micro_batch_tokens"}
    assert found["numbers", 1.3].keys() >= {"engine.memory_gb", "model.lora.rank"}
    assert "model.lora.rank" not in found["own adapter", 1.3]
    assert "engine.memory_gb" in found["sleeping server", 4.4]
    nothing = fit_check(recipe(small), small, section="train", memory_gb=0.5)
    assert "use a smaller model, shorter conversations (limits.context), or more memory" in nothing.text


@pytest.mark.slow
def test_fine_tuning_and_cpus_are_told_what_fits_too(small: str) -> None:
    for section, place, gib in (("sft", "cuda", 1.3), ("sft", "cpu", 2.5), ("train", "cpu", 2.5)):
        config = recipe(small, model={"device": place})
        check = fit_check(config, small, section=section, memory_gb=gib)
        assert check.status == "fail"
        assert fit_check(applied(config, check), small, section=section, memory_gb=gib).status == "ok", check


@pytest.mark.slow
def test_a_server_is_counted_on_the_gpu_that_it_uses(smaller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    apart = recipe(smaller, engine={"name": "vllm", "memory_gb": 1.5})
    trainer, needs = "predicted peak of a training step", 1.5 + SERVER_BYTES / 2**30
    unknown = fit_check(apart, smaller, section="train", memory_gb=4.0)
    assert unknown.status == "note"  # this machine has no GPU that says whether there are two
    assert "GiB on a second GPU for the server. On one GPU (engine.devices=[0]):" in unknown.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert fit_check(apart, smaller, section="train", memory_gb=4.0).status == "ok"
    too_small = fit_check(apart, smaller, section="train", memory_gb=3.0)
    assert too_small.status == "fail"
    assert f"a GPU of a server needs {needs + 0.1:.1f} GiB" in too_small.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    shared = fit_check(apart, smaller, section="train", memory_gb=4.0)
    assert shared.status == "fail"
    assert shared.text.startswith(trainer)
    assert "the server's KV cache 1.5" in dict(shared.details)["sampling, in GiB"]
    again = fit_check(applied(apart, shared), smaller, section="train", memory_gb=4.0)
    assert again.status == "ok"


@pytest.mark.slow
def test_the_doctor_says_what_starting_the_servers_would(small: str, model: Path, tmp_path: Path) -> None:
    python = tmp_path / "no" / "python"
    tree = {"engine": {"name": "vllm", "python": str(python)}, "model": {"device": "cpu"}}
    config = recipe(str(model), **tree)
    found = {check.name: check for check in examine(str(model), config, weights="never")}
    assert found["engine"].status == "fail"
    command = ServerCommand(name="vLLM server 0", arguments=[str(python)], log=tmp_path / "log")
    with pytest.raises(EngineError) as raised:
        ServerProcess(command).start()
    assert found["engine"].text == str(raised.value)


@pytest.mark.slow
def test_an_interpreter_without_the_engine_is_named(tmp_path: Path) -> None:
    import sys

    with pytest.raises(EngineError, match=r"python.*: No module named 'not_an_engine'\. Set engine\.python to"):
        installed_version("A server", sys.executable, "not_an_engine")
    assert installed_version("A server", sys.executable, "pytest") == pytest.__version__
    # a build under another name, as vLLM's for CPUs
    assert installed_version("A server", sys.executable, "yaml") == f"{yaml.__version__} (PyYAML)"


def test_a_recipe_of_init_has_no_longer_context_than_the_model(tmp_path: Path, model: Path) -> None:
    model_config = read_model_config(str(model))
    model_config.max_position_embeddings = 1500
    model_config.save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    found = starter(path, read_model_config(path), 24.0)
    assert found.context == 1500
    assert found.plan is not None
    lines = starter_lines(found, 24.0)
    assert "context: 1500 " in lines["  tokens_per_turn: 64"]
    assert any(" million parameters" in line for line in lines.values())
    write_project(tmp_path / "new", model=path, changes=lines)
    longer, _ = load(tmp_path / "new" / "recipe.yaml", ["model.device=cuda", "limits.context=1501"])
    with pytest.raises(
        ConfigError, match=r"limits\.context=1501 is more than the model's longest context, 1500 tokens"
    ):
        fit_check(longer, path, section="train", memory_gb=24.0)


@pytest.mark.slow
def test_a_recipe_of_init_moves_to_smaller_cards(tmp_path: Path) -> None:
    """With the numbers that init and the doctor print."""
    path = str(save_config(tmp_path / "model", "1.7B"))
    found = starter(path, read_model_config(path), 24.0)
    assert found.plan is not None
    printed = starter_check(found.plan, found.context, read_model_config(path), 24.0)
    write_project(tmp_path / "new", model=path, changes=starter_lines(found, 24.0))
    file = tmp_path / "new" / "recipe.yaml"
    config, _ = load(file, ["model.device=cuda"])
    for gib in (24.0, 16.0, 12.0, 8.0):
        check = fit_check(config, path, section="train", memory_gb=gib)
        assert check.status == ("ok" if gib == 24 else "fail")
        if gib == 24:  # one number for both
            assert check.text == printed.text
            assert "128 conversations of up to 3,328 tokens" in check.text
            assert "# the most with which an update fits into 92% of 24 GiB\n" in file.read_text()
        if gib < 24:
            assert fit_check(applied(config, check), path, section="train", memory_gb=gib).status == "ok", check


def with_instead(recipe: str) -> str:
    """The text of a recipe with the lines that it has in comments as `# instead`, in place of those of the same options."""
    lines = recipe.splitlines()
    for line in list(lines):
        if re.match(" *# .* # instead", line):
            option = line.replace("# ", "", 1)
            (place,) = [n for n, own in enumerate(lines) if own.startswith(f"{option.partition(':')[0]}:")]
            lines[place] = option
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "gib", "fewer"),
    [
        ("0.6B", 16.0, True),
        ("0.6B", 48.0, False),
        ("1.7B", 16.0, False),
        ("1.7B", 24.0, True),
        ("1.7B", 80.0, True),
        ("4B", 16.0, None),
    ],
)
def test_what_a_recipe_of_init_says_of_vllm_fits_into_it(
    size: str, gib: float, fewer: bool | None, tmp_path: Path
) -> None:
    """The lines that it has in comments (`fewer`: also a smaller micro-batch; None: no room), in place of its own."""
    path = str(save_config(tmp_path / "model", size))
    found = starter(path, read_model_config(path), gib)
    write_project(tmp_path / "new", model=path, changes=starter_lines(found, gib))
    file = tmp_path / "new" / "recipe.yaml"
    others = [line for line in file.read_text().splitlines() if re.match(" *# .* # instead", line)]
    assert [re.findall(r"micro_batch_tokens: |name: vllm, ", line)[0] for line in others] == (
        [] if fewer is None else ["micro_batch_tokens: "] * fewer + ["name: vllm, "]
    )
    if not others:
        assert "{name: vllm} does not fit on the same GPU" in file.read_text()
        return
    file.write_text(with_instead(file.read_text()))
    beside, notes = load(file, ["model.device=cuda"])
    refuse_without_effect(beside)
    assert notes == []
    check = fit_check(beside, path, section="train", memory_gb=gib)
    assert check.status == "ok", check
    assert "computed" not in dict(check.details)
    peak = float(check.text.partition("step: ")[2].partition(" GiB")[0])
    assert (USABLE - 0.01) * gib - 0.1 < peak  # nothing is wasted
    assert (
        what_fits.assembly.place_of_servers(beside)
        == "on GPU 0, which the trainer uses in turns with it (engine.sleep)"
    )
