"""The memory that a rank needs, the fewest devices of a recipe, and the command that says them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from support.hybrids import CONFIGS, save_hybrid
from support.recipes import save_recipe
from turnwise.assembly import conversations
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.doctor.fit import USABLE
from turnwise.doctor.memory import changed, predict, read_model_config, workload_of
from turnwise.errors import ConfigError
from turnwise.models.device import GpuMemory
from turnwise.options.schema import Config
from turnwise.planning.memory import (
    engine_memory_lines,
    fitted_to_ranks,
    number_of_ranks,
    rank_memory,
    rank_memory_check,
    refuse_impossible,
)
from turnwise.planning.placement import ConversationTokens, fine_tuning_lines, placement_lines
from turnwise.sft.fine_tune import conversation_tokens

# The memory that a rank needs, and the fewest devices of a recipe, for training and fine-tuning.


# The plan of a run on several ranks: memory of a rank, numbers, and combinations that are refused.


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    return save_recipe(tmp_path, model, train={"steps": 2, "batch_size": 2, "group_size": 4})


def parts(recipe: Path, ranks: int, *overrides: str) -> dict[str, float]:
    config, _ = load(recipe, ["cluster=torchrun", *overrides])
    model_config = read_model_config(config.model.path)
    found = rank_memory(config, model_config, workload_of(config, model_config, "train"), ranks)
    return {part.name: part.bytes for part in found.parts}


@pytest.mark.slow
def test_a_rank_has_its_part_of_weights_gradients_and_optimizer(recipe: Path) -> None:
    config, _ = load(recipe)
    model_config = read_model_config(config.model.path)
    workload = workload_of(config, model_config, "train")
    one = {part.name: part.bytes for part in predict(config, model_config, workload).parts}
    four = parts(recipe, 4, "cluster.fsdp.gradient_sync=micro_batch")
    for name in ("weights", "optimizer", "gradients"):
        assert four[name] == one[name] / 4
    assert four["copy of the engine"] == one["weights"]
    assert four["activations"] == one["activations"]
    assert four["KV cache"] == one["KV cache"]


@pytest.mark.slow
def test_options_of_fsdp_change_the_memory(recipe: Path) -> None:
    plain = parts(recipe, 4)
    kept = parts(recipe, 4, "cluster.fsdp.reshard_after_forward=false")
    assert kept["gathered layers"] == 4 * plain["weights"]
    assert parts(recipe, 4, "cluster.fsdp.gradient_sync=batch")["gradients"] == 4 * plain["weights"]
    half = parts(recipe, 4, "cluster.fsdp.reshard_after_forward=false", "cluster.fsdp.param_dtype=bfloat16")
    assert half["gathered layers"] == kept["gathered layers"] / 2
    assert "weights" not in parts(recipe, 4, "cluster.fsdp.offload=cpu")
    assert parts(recipe, 4, "cluster.mesh.shard=2")["weights"] == 2 * plain["weights"]
    pair = parts(recipe, 4, "cluster.mesh.tensor=2")
    assert plain["weights"] < pair["weights"] < 1.01 * plain["weights"]  # both ranks of a pair have the norms
    assert pair["gathered layers"] < plain["gathered layers"]
    assert 0.5 * plain["activations"] < pair["activations"] < plain["activations"]


@pytest.mark.parametrize(
    ("options", "of_a_batch", "of_each"),
    [
        ((), 4, 2),
        (("train.optimizer.grad_accum_dtype=float32",), 4, 4),
        (("cluster.fsdp.reduce_dtype=bfloat16",), 2, 2),
    ],
)
def test_sums_of_gradients_in_bfloat16_have_the_type_in_which_ranks_add_them_up(
    recipe: Path, options: tuple[str, ...], of_a_batch: int, of_each: int
) -> None:
    options = ("model.dtype=bfloat16", *options)
    weights = parts(recipe, 4, *options)["weights"] * 4 / 2
    assert parts(recipe, 4, *options)["gradients"] == of_a_batch * weights  # below 1 GiB of float32 gradients
    assert parts(recipe, 4, *options, "cluster.fsdp.gradient_sync=batch")["gradients"] == of_a_batch * weights
    assert parts(recipe, 4, *options, "cluster.fsdp.gradient_sync=micro_batch")["gradients"] == of_each * weights / 4


def test_a_model_whose_heads_are_not_divided_is_refused(recipe: Path) -> None:
    config, _ = load(recipe, ["cluster=torchrun", "cluster.mesh.tensor=4"])
    with pytest.raises(ConfigError, match=r"the model .* has 2 key and value heads, which 4 ranks cannot divide"):
        refuse_impossible(config, 4, read_model_config(config.model.path))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


@pytest.fixture(scope="module")
def hybrid_recipe(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With few tokens: tracing the linear attention of many takes long, and changes no weights."""
    train = {"steps": 2, "batch_size": 2, "group_size": 4, "micro_batch_tokens": 512}
    return save_recipe(tmp_path_factory.mktemp("recipe"), hybrid, limits={"context": 512}, train=train)


@pytest.fixture(scope="module")
def plain(hybrid_recipe: Path) -> dict[str, float]:
    return parts(hybrid_recipe, 4)


@pytest.mark.slow
def test_both_ranks_of_a_pair_have_the_linear_attention_of_a_hybrid(
    hybrid: Path, hybrid_recipe: Path, plain: dict[str, float]
) -> None:
    pair = parts(hybrid_recipe, 4, "cluster.mesh.tensor=2")
    model = AutoModelForCausalLM.from_pretrained(hybrid)
    linear = sum(part.numel() for name, part in model.named_parameters() if "linear_attn" in name)
    assert pair["weights"] - plain["weights"] == pytest.approx(4 * linear / 4, rel=0.1)


def test_ranks_that_divide_the_experts_gather_less(hybrid: Path, hybrid_recipe: Path, plain: dict[str, float]) -> None:
    divided = parts(hybrid_recipe, 4, "cluster.mesh.expert=2")
    assert divided["weights"] == plain["weights"]
    model = AutoModelForCausalLM.from_pretrained(hybrid)
    experts = sum(part.numel() for name, part in model.named_parameters() if ".experts." in name)
    # two layers are gathered, each with half of its experts
    assert plain["gathered layers"] - divided["gathered layers"] == pytest.approx(4 * experts / 4, rel=0.1)
    config, _ = load(hybrid_recipe, ["cluster=torchrun", "cluster.mesh.expert=3"])
    with pytest.raises(ConfigError, match=r"cluster\.mesh\.expert=3: .* has 4 experts, which 3 ranks cannot divide"):
        refuse_impossible(config, 6, read_model_config(config.model.path))


def test_experts_that_a_model_has_not_are_refused(recipe: Path) -> None:
    config, _ = load(recipe, ["cluster=torchrun", "cluster.mesh.expert=2"])
    with pytest.raises(ConfigError, match="has the type qwen3, whose experts are not divided so"):
        refuse_impossible(config, 4, read_model_config(config.model.path))


@pytest.mark.parametrize("section", ["teacher", "critic", "reference"])
def test_a_model_beside_the_trained_one_that_is_not_divided_is_refused(
    recipe: Path, tmp_path: Path, section: str
) -> None:
    config = LlamaConfig(num_attention_heads=3, num_key_value_heads=3, hidden_size=48, num_hidden_layers=1)
    config.save_pretrained(tmp_path / "other")
    used = {"critic": ["credit=gae"], "reference": ["loss.kl_coef=0.1"], "teacher": []}[section]
    words = ["cluster=torchrun", "cluster.mesh.tensor=2", f"{section}.path={tmp_path / 'other'}", *used]
    loaded, _ = load(recipe, words)
    with pytest.raises(ConfigError, match=r"the model .*other has 3 attention heads, which 2 ranks cannot divide"):
        refuse_impossible(loaded, 4, read_model_config(loaded.model.path))


def test_a_hybrid_without_a_plan_is_not_divided(recipe: Path, tmp_path: Path) -> None:
    CONFIGS["lfm2"]().save_pretrained(tmp_path / "hybrid")
    loaded, _ = load(recipe, ["cluster=torchrun", "cluster.mesh.tensor=2"])
    with pytest.raises(ConfigError, match="the type lfm2, for which transformers has no plan"):
        refuse_impossible(loaded, 4, read_model_config(str(tmp_path / "hybrid")))


@pytest.mark.slow
def test_ranks_with_parts_of_the_tokens_have_layers_with_a_state_for_all_tokens(
    hybrid_recipe: Path, plain: dict[str, float]
) -> None:
    """Half of the layers, whose activations do not fall."""
    cut = parts(hybrid_recipe, 4, "cluster.mesh.context=2")
    assert cut["layers with a state, of all tokens"] == 0.5 * cut["activations"]
    assert cut["activations"] < 0.6 * plain["activations"]


@pytest.mark.slow
def test_what_would_fit_on_a_rank_is_named_without_what_the_recipe_has(recipe: Path) -> None:
    config, _ = load(recipe, ["cluster=torchrun", "limits.context=512", "train.micro_batch_tokens=16384"])
    model_config = read_model_config(config.model.path)
    workload = workload_of(config, model_config, "train")

    def peak(config: Config) -> float:
        return rank_memory(config, model_config, workload, 2).gib

    def what_fits(config: Config, gib: float) -> str:
        check = rank_memory_check(config, 2, section="train", memory_gb=gib)
        assert check.status == "fail"
        return check.text.partition(f", and there are {gib:.1f} GiB: ")[2]

    fewer = changed(config, ["train", "micro_batch_tokens"], 512)
    fits = what_fits(config, peak(fewer) + 0.001)
    assert fits == f"set train.micro_batch_tokens=512 ({peak(fewer):.1f} GiB)"
    again = changed(config, ["model", "gradient_checkpointing"], True)
    fits = what_fits(again, peak(fewer) + 0.001)
    assert "micro_batch_tokens=512" in fits
    assert "gradient_checkpointing" not in fits
    fits = what_fits(fewer, 0.1)
    assert fits == (
        "no option of the recipe changes that: use more ranks, a server engine, a smaller model, shorter conversations "
        "(limits.context), or more memory"
    )
    assert "micro_batch_tokens" not in fits


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[], ["cluster.mesh.context=2"]])
def test_ranks_compute_with_the_memory_of_the_fullest_of_their_gpus(recipe: Path, mesh: list[str]) -> None:
    words = [
        "cluster=local",
        "cluster.trainers=2",
        "model.device=cuda",
        "model.dtype=float32",
        "limits.context=512",
        *mesh,
    ]
    config, _ = load(recipe, words)
    path, model_config = config.model.path, read_model_config(config.model.path)
    workload = workload_of(config, model_config, "train")

    def fitted(*free: float) -> tuple[Config, list[str]]:
        gpus = [GpuMemory("A card", 24 * 2**30, int(gib * 2**30)) for gib in free]
        return fitted_to_ranks(config, path, gpus, section="train")

    computed: list[int] = []
    for gib in (0.68, 0.72, 3.0):
        known, notes = fitted(gib, 4.0)
        tokens, embedded = known.train.micro_batch_tokens, known.engine.embedded
        assert tokens is not None
        assert embedded is not None
        assert notes == [
            f"computed for A card with 24.0 GiB, of which other processes use {24 - gib:.1f}, the fullest GPU of 2 ranks, where "
            f"the recipe has no number: train.micro_batch_tokens={tokens}"
            + ("" if embedded.memory_gb is None else f", engine.memory_gb={embedded.memory_gb}")
        ]
        assert fitted(4.0, gib) == (known, notes)
        parts = rank_memory(known, model_config, workload, 2, card_gib=gib).parts
        update = sum(part.bytes for part in parts if part.name != "KV cache") / 2**30
        assert update + (embedded.memory_gb or 0) <= USABLE * gib + 0.001
        assert (embedded.memory_gb or 0) > (1 if gib > 1 else -1)
        computed.append(tokens)
        check = rank_memory_check(config, 2, section="train", memory_gb=gib)
        assert f"{rank_memory(known, model_config, workload, 2, card_gib=gib).gib:.1f} GiB (rank 0)" in check.text
    assert computed[0] < computed[1] < computed[2] == (32768 if mesh else 16384)
    assert fitted_to_ranks(config, path, [], section="train") == (config, [])
    known, notes = fitted(0.5, 4.0)
    assert known == changed(config, ["train", "micro_batch_tokens"], 512)
    assert notes[0].endswith("where the recipe has no number: train.micro_batch_tokens=512")


@pytest.mark.slow
def test_ranks_with_parts_of_the_tokens_keep_parts_of_the_activations(recipe: Path) -> None:
    tokens = "train.micro_batch_tokens=4096"
    plain, cut = parts(recipe, 4, tokens), parts(recipe, 4, tokens, "cluster.mesh.context=2")
    assert cut["weights"] == plain["weights"]
    assert 0.4 * plain["activations"] < cut["activations"] < 0.6 * plain["activations"]
    assert 0 < cut["keys and values of all tokens"] < plain["activations"]


def test_a_mesh_needs_the_number_of_ranks_that_torchrun_starts(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config, _ = load(recipe, ["cluster.launcher=torchrun", "cluster.mesh.shard=2"])
    with pytest.raises(ConfigError, match="add --ranks N"):
        number_of_ranks(config, None)
    assert number_of_ranks(config, 4) == 4


def test_passes_in_bfloat16_keep_smaller_activations(recipe: Path) -> None:
    exact, mixed = parts(recipe, 4), parts(recipe, 4, "cluster.fsdp.param_dtype=bfloat16")
    assert mixed["activations"] < exact["activations"]
    for name in ("weights", "optimizer", "gradients", "KV cache", "copy of the engine"):
        assert mixed[name] == exact[name]


def test_only_rank_0_has_the_embedded_engine(recipe: Path) -> None:
    config, _ = load(recipe, ["cluster=torchrun"])
    model_config = read_model_config(config.model.path)
    workload = workload_of(config, model_config, "train")
    first, second = (
        {part.name: part.bytes for part in rank_memory(config, model_config, workload, 2, rank=rank).parts}
        for rank in range(2)
    )
    assert set(first) - set(second) == {"KV cache", "copy of the engine"}
    assert second["program"] < first["program"]
    assert {name: second[name] for name in second if name != "program"} == {
        name: first[name] for name in second if name != "program"
    }


def test_the_number_of_ranks_is_that_of_the_launcher(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert number_of_ranks(load(recipe)[0], None) == 1
    assert number_of_ranks(load(recipe, ["cluster=local", "cluster.trainers=3"])[0], None) == 3
    assert number_of_ranks(load(recipe, ["cluster=torchrun"])[0], 16) == 16
    with pytest.raises(ConfigError, match="--ranks 4: the recipe has 3 ranks"):
        number_of_ranks(load(recipe, ["cluster=local", "cluster.trainers=3"])[0], 4)


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["cluster=torchrun"], 16, "16 ranks and 8 conversations for each optimizer step"),
        (["cluster=torchrun", "train.minibatches=2"], 8, "8 ranks and 4 conversations for each optimizer step"),
        (["engine={name: vllm, tensor_parallel: 3}"], 1, "engine.tensor_parallel=3: the 4 attention heads"),
    ],
)
def test_impossible_combinations_are_refused(recipe: Path, overrides: list[str], ranks: int, message: str) -> None:
    config, _ = load(recipe, overrides)
    with pytest.raises(ConfigError) as caught:
        refuse_impossible(config, ranks, read_model_config(config.model.path))
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_command_prints_placement_and_memory_of_the_ranks(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "cluster=torchrun", "--ranks", "4", "--memory-gb", "64"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "4 ranks, each on a device of its own" in output
    assert "on each of 4 ranks" in output
    assert "2 for each optimizer step, on average" in output
    assert "the memory of passes on a CPU" in output
    assert main(["plan", str(recipe), "cluster=torchrun", "--ranks", "4", "--memory-gb", "0.001"]) == 1
    assert (
        main(["plan", str(recipe), "cluster=torchrun", "--ranks", "4", "model.device=cuda", "--memory-gb", "64"]) == 0
    )
    assert capsys.readouterr().out.count("the memory of passes on a CPU") == 1  # not for GPUs


def test_the_placement_names_rollout_workers(recipe: Path) -> None:
    config, _ = load(recipe, ["cluster=ray", "cluster.workers.count=3", "cluster.workers.num_gpus=1"])
    lines = {line.name: line.value for line in placement_lines(config, device="cpu")}
    assert lines["environments and tools"].startswith("in 3 rollout workers on a Ray cluster, each with 1 CPUs, 1 GPUs")
    assert lines["engine"] == "in each rollout worker, with a copy of the weights"


def test_the_placement_names_ranks_and_rollout_workers_on_a_ray_cluster(recipe: Path) -> None:
    words = ["cluster=ray", "cluster.trainers=4", "cluster.ranks={num_cpus: 8, resources: {trainer: 1}}"]
    config, _ = load(recipe, [*words, "cluster.workers.count=3"])
    assert number_of_ranks(config, None) == 4
    lines = {line.name: line.value for line in placement_lines(config, device="cuda", ranks=4)}
    assert lines["trainer"] == (
        "4 ranks on the Ray cluster, on as few machines as possible, each with 8 CPUs, 1 GPUs, trainer=1"
    )
    assert lines["engine"] == "in each rollout worker, with a copy of the weights"
    assert lines["environments and tools"].startswith("in 3 rollout workers on a Ray cluster")
    assert "copy of the engine" not in parts(recipe, 4, *words)


def test_engines_in_workers_and_on_servers_need_memory_there_and_not_in_the_trainer(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = load(recipe, ["cluster=ray"])
    model_config = read_model_config(config.model.path)
    workload = workload_of(config, model_config, "train")
    here = {part.name: part.bytes for part in predict(load(recipe)[0], model_config, workload).parts}
    trainer = {part.name: part.bytes for part in predict(config, model_config, workload).parts}
    assert set(here) - set(trainer) == {"KV cache"}
    (line,) = engine_memory_lines(config, model_config)
    gib = (here["weights"] + here["KV cache"] + here["program"]) / 2**30
    assert line.name == "memory of a worker"
    assert line.value.startswith(f"{gib:.2f} GiB: weights ")
    servers, _ = load(recipe, ["engine={name: vllm, tensor_parallel: 2, memory_gb: 3}", "cluster=ray"])
    line, held = engine_memory_lines(servers, model_config)
    half = here["weights"] / 2 / 2**30
    assert line.value == f"{half + 3:.2f} GiB: weights {half:.2f}, KV cache 3.00"
    token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * model_config.head_dim * 4
    each = f"of {workload.tokens:,} tokens, {token / 1024:.4g} KiB a token; 1 server with 2 devices"
    assert (held.name, held.value) == (
        "the KV cache of servers holds",
        f"all {workload.conversations} conversations ({each})",
    )
    # without engine.memory_gb, the size that the run gives its servers on the CPU
    small, _ = load(recipe, ["engine={name: vllm}"])
    line, _ = engine_memory_lines(small, model_config)
    assert line.value == f"{2 * half + 1:.2f} GiB: weights {2 * half:.2f}, KV cache 1.00"
    quantized, _ = load(recipe, ["engine={name: vllm, memory_gb: 3, arguments: [--quantization, fp8]}"])
    line, _ = engine_memory_lines(quantized, model_config)
    model = AutoModelForCausalLM.from_config(model_config)
    inside = sum(weight.numel() for weight in model.model.layers.parameters() if weight.ndim > 1)
    eight = (here["weights"] - 3 * inside) / 2**30  # float32
    assert line.value.startswith(f"{eight + 3:.2f} GiB: weights {eight:.2f}, KV cache 3.00 (engine.arguments=--quanti")
    assert line.value.endswith(f"8 bits inside of layers; an update brings {2 * half:.2f})")
    other, _ = load(recipe, ["engine={name: vllm, memory_gb: 3, arguments: [--quantization, bitsandbytes]}"])
    line, _ = engine_memory_lines(other, model_config)
    assert line.value.endswith("--quantization bitsandbytes: fewer bits of the weights are not counted)")
    on_gpus, _ = load(recipe, ["engine={name: sglang}", "model.device=cuda"])
    (line,) = engine_memory_lines(on_gpus, model_config)
    assert line.value.endswith("sglang chooses the size of its KV cache (engine.memory_gb)")
    lines = {line.name: line.value for line in placement_lines(servers, device="cuda")}
    assert lines["engine"].startswith("in each rollout worker: vllm: 1 server, started by the run, x 2 devices")
    assert engine_memory_lines(load(recipe)[0], model_config) == []
    assert main(["plan", str(recipe), "cluster=ray", "--memory-gb", "64"]) == 0
    assert "memory of a worker" in capsys.readouterr().out


# The plan of a recipe for fine-tuning: counted tokens, ranks, memory, and what is refused.


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a" * (8 * number)}]


@pytest.fixture
def fine_tuning_recipe(model: Path, tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"messages": talk(number)}) + "\n" for number in range(1, 7))
    (tmp_path / "train.jsonl").write_text(rows)
    return save_recipe(
        tmp_path,
        model,
        environment="turnwise.environments.environment:SingleTurn",
        data={"train": str(tmp_path / "train.jsonl")},
        sft={"epochs": 2, "batch_size": 4},
    )


def test_tokens_are_those_of_fine_tuning(fine_tuning_recipe: Path) -> None:
    config, _ = load(fine_tuning_recipe)
    counted = conversation_tokens(config, conversations(config))
    # one token for each letter, and one at the end of the turn
    assert [one.trained for one in counted] == [8 * number + 1 for number in range(1, 7)]
    assert [one.tokens - counted[0].tokens for one in counted] == [8 * number for number in range(6)]
    masked, _ = load(fine_tuning_recipe, ["loss_mask=last_round"])
    assert [one.trained for one in conversation_tokens(masked, conversations(masked))] == [
        one.trained for one in counted
    ]


def test_lines_of_a_step_say_how_often_and_which_conversations_are_used(fine_tuning_recipe: Path) -> None:
    config, _ = load(fine_tuning_recipe)
    counted = [ConversationTokens(tokens, tokens // 2) for tokens in (10, 20, 60)]
    lines = {line.name: line.value for line in fine_tuning_lines(config, rows=6, counted=counted, context=30, ranks=2)}
    assert lines["steps"] == "3: 6 conversations, each used 2 times"
    assert lines["conversations of a rank"].startswith("2 for each step")
    assert lines["tokens of a conversation"] == "15 on average, at most 20 (of 3 counted conversations)"
    assert lines["trained tokens of a conversation"] == "8 on average"  # 7.5, rounded to even
    assert lines["tokens of a step"] == "60 on average"
    assert lines["too long"] == "1 have more than 30 tokens, and are left out (sft.too_long)"


@pytest.mark.slow
def test_the_command_prints_the_plan_of_fine_tuning(
    fine_tuning_recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(fine_tuning_recipe), "cluster=torchrun", "--ranks", "2", "--memory-gb", "64"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "3: 6 conversations, each used 2 times" in output
    assert "2 ranks, each on a device of its own (cpu), started by torchrun" in output
    assert "engine" not in output
    assert main(["plan", str(fine_tuning_recipe), "--memory-gb", "64"]) == 0
    assert "predicted peak of a training step" in capsys.readouterr().out
    assert main(["plan", str(fine_tuning_recipe), "--memory-gb", "0.001"]) == 1
    capsys.readouterr()
    for arguments, message in (
        (
            ["cluster=torchrun", "--ranks", "8"],
            "8 ranks and 4 conversations for each optimizer step (sft.batch_size=4)",
        ),
        (["train.steps=3"], "train.steps has no effect in fine-tuning"),
    ):
        assert main(["plan", str(fine_tuning_recipe), *arguments]) == 1
        captured = capsys.readouterr()
        assert message in " ".join((captured.out + captured.err).split())


# The plan of a recipe for training: batch arithmetic, and a memory that is too small.


@pytest.mark.slow
def test_the_command_prints_the_plan(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = {"steps": 3, "batch_size": 2, "group_size": 4, "minibatches": 2}
    recipe = save_recipe(tmp_path, model, train=train, limits={"tokens": 24, "turns": 1})
    assert main(["plan", str(recipe)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "conversations of a step 2 rows x 4 = 8" in text
    assert "2 minibatches x 1 epoch = 2, each on 4 conversations" in text
    assert "at most 192" in text
    assert "memory predicted peak of a training step" in text
    assert "ready for training" not in text


@pytest.mark.slow
def test_the_command_refuses_a_plan_that_does_not_fit(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = save_recipe(tmp_path, model)
    assert main(["plan", str(recipe), "--memory-gb", "0.1"]) == 1
    assert "and there are 0.1 GiB" in capsys.readouterr().out
