"""Several ranks compute the losses, values, gradients and weights of one process, in the memory that is predicted."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver as dcp_save
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import turnwise
from support.hybrids import hybrid
from support.mixtures import mixture
from support.tiny import save_model, tiny_model
from support.vision import save_qwen2_vl, save_qwen3_vl, save_vision_model
from turnwise.doctor.memory import Workload
from turnwise.errors import ConfigError, RunError
from turnwise.models import allocator
from turnwise.models.cpu import with_fast_layers
from turnwise.models.loading import recompute_layers
from turnwise.options.engines import FsdpSection
from turnwise.options.schema import Config
from turnwise.planning.memory import rank_memory
from turnwise.training.sharded import ranks as rank_groups
from turnwise.training.sharded.ranks import Mesh as MeshOfRanks
from turnwise.training.sharded.remembered_bound import FILE, MicroBatchTooLarge, RememberedBound
from turnwise.training.sharded.sharded_model import ShardedModel
from turnwise.training.sharded.shards import complete_state, share_out
from turnwise.version import source_checksum, source_version

# Several ranks compute the losses, gradients and weights of one process, and go on with what another number of ranks
# saved.


TESTS = Path(__file__).parent.parent

EXACT = [
    "ppo_clip_epochs",
    "sync_each",
    "keep_gathered",
    "gspo",
    "cispo",
    "reference",
    "lora_reference",
    "lora_copy",
    "dora",
    "checkpointing",
    "correction",
    "selection",
    "separate_rows",
    "one_micro_batch",
    "clipped",
    "experts",
    "teacher_sampled",
    "teacher_divergence",
    "teacher_under_the_adapter",
    "teacher_is_the_student",
]

ROUNDED = ["bfloat16", "mixed", "autocast"]

ON_ONE_RANK = ["ppo_clip", "lora_reference"]

IN_TWO_GROUPS = [
    "sync_each",
    "keep_gathered",
    "lora_copy",
    "clipped",
    "experts",
    "teacher_divergence",
]


TOGETHER = {
    "parts": [
        "ppo_clip_epochs",
        "gspo",
        "cispo",
        "lora_reference",
        "checkpointing",
        "selection",
        "separate_rows",
        "one_micro_batch",
        "experts",
        "teacher_divergence",
        "window",
        "capped",
        "qwen3_next",
        "qwen3_5_moe",
        "lfm2",
    ],
    "two_parts": ["lora_copy", "experts", "qwen3_next"],
    "parts_of_pairs": ["one_micro_batch", "experts", "teacher_divergence", "qwen3_5"],
    "pair": [
        "ppo_clip_epochs",
        "sync_each",
        "lora_reference",
        "experts",
        "idle_experts",
        "checkpointing",
        "teacher_divergence",
        "llama",
        "mistral",
        "qwen2",
        "qwen3_next",
        "qwen3_next_lora",
        "qwen3_5_moe",
    ],
    "square": ["lora_copy", "experts", "separate_rows", "qwen3_5", "qwen3_5_moe"],
}
"""On two and four ranks, of which two, or all four, compute each micro-batch together."""

MIXTURES = ("mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2")

OF_EXPERTS = {
    "experts_of_pair": ["experts", "idle_experts", "experts_again", "experts_each", "qwen3_next", *MIXTURES],
    "experts_of_four": ["experts", "qwen3_5_moe"],
    "experts_in_groups": ["experts", "experts_each"],
    "experts_of_all": ["experts", "idle_experts"],
    "experts_of_parts": ["experts"],
}
"""On two and four ranks that divide the experts: two of them, in two groups, all four, and with parts of the tokens."""

CHAIN = ("one", "two", "pair", "parts", "four", "square", "two_parts", "parts_of_pairs")

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DENSE: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
"""Types of models that tensor parallelism divides, beside those of `model` and `experts`."""
OF_PARTS: dict[str, Any] = {
    "window": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "capped": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 4, "head_dim": 8, "final_logit_softcapping": 5.0}),
}
"""Models whose layers see some of the tokens before a token only, or have no output layer of their own."""

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2")
"""Models with layers that keep a state, some with experts."""

Mesh = dict[str, int]
World = tuple[int, Sequence[Sequence[Path | str | Mesh]]]
"""A number of ranks, and the programs of this folder that they run, each on a mesh of its own."""


def run_ranks(*worlds: World) -> None:
    """Run each world, after the one before it has ended."""
    words = [[size, [[mesh, *map(str, rest)] for mesh, *rest in programs]] for size, programs in worlds]
    source = TESTS.parent / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{source}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(TESTS / "cluster" / "programs.py"), json.dumps(words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]


@torch.no_grad()
def save_one_sided(folder: Path) -> None:
    """A model whose routers choose the first two experts for all tokens: the ranks with the others have nothing to compute."""
    model: Any = mixture("qwen3_moe")
    model.get_input_embeddings().weight[:, 0] = 10.0
    for layer in model.model.layers:
        layer.mlp.gate.weight.mul_(0.1)[:, 0] = torch.linspace(1.0, -1.0, 8)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def of_all_programs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all programs by the names of their files: of one rank, of two ranks, of two that compute together with parts
    of the layers (`pair`) or of the tokens (`parts`), of four ranks in two groups, in two pairs, in two groups with parts, and
    all together, and of one rank. Each goes on with what the one before has saved."""
    out = tmp_path_factory.mktemp("ranks")
    mixture("qwen3_moe").save_pretrained(model.parent / "experts")
    save_one_sided(model.parent / "one_sided")
    save_model(model.parent / "teacher", seed=3)
    for name, (config, kind, *options) in {**DENSE, **OF_PARTS}.items():
        torch.manual_seed(4)
        kind(config(**SIZES, **(options[0] if options else {}))).save_pretrained(model.parent / name)
    for name in MIXTURES:
        mixture(name).save_pretrained(model.parent / name)
    for name in HYBRIDS:
        hybrid(name).save_pretrained(model.parent / name)
    head = save_head(model, out / "head")
    vision = save_vision_model(out / "vision")
    saved: Path | str = "-"

    def passes(name: str, mesh: Mesh, cases: Sequence[str]) -> Sequence[Path | str | Mesh]:
        nonlocal saved
        before, saved = saved, out / f"of-{name}"
        return [mesh, "rank_program", model, out / f"{name}.json", saved, before, *cases]

    def critics(name: str, mesh: Mesh, cases: Sequence[str]) -> Sequence[Path | str | Mesh]:
        return [mesh, "critic_program", model, head, out / f"{name}-critics.json", out / f"{name}-critic", "-", *cases]

    def experts(
        name: str, mesh: Mesh, written: Path | str = "-", read: Path | str = "-"
    ) -> Sequence[Path | str | Mesh]:
        return [{"expert": 2, **mesh}, "rank_program", model, out / f"{name}.json", written, read, *OF_EXPERTS[name]]

    run_ranks(
        (1, [passes("one", {}, ON_ONE_RANK)]),
        (
            2,
            [
                passes("two", {}, [*EXACT, *ROUNDED]),
                passes("pair", {"tensor": 2}, [*TOGETHER["pair"], "autocast"]),
                passes("parts", {"context": 2}, TOGETHER["parts"]),
                critics("two", {}, [*CRITIC_EXACT, "bfloat16"]),
                critics("pair", {"tensor": 2}, CRITIC_TOGETHER),
                critics("parts", {"context": 2}, CRITIC_TOGETHER),
                [{}, "image_program", vision, out / "images.json"],
                [{"tensor": 2}, "image_program", vision, out / "images-pair.json"],
                [{"context": 2}, "image_program", vision, out / "images-context.json"],
                [{"context": 2}, "image_program", out / "qwen3_vl", out / "images-context-qwen3_vl.json"],
                [{"tensor": 2}, "image_program", save_qwen2_vl(out / "qwen2_vl"), out / "images-qwen2_vl.json"],
                [{"tensor": 2}, "image_program", save_qwen3_vl(out / "qwen3_vl"), out / "images-qwen3_vl.json"],
                experts("experts_of_pair", {}),
            ],
        ),
        (
            4,
            [
                passes("four", {"replicate": 2}, IN_TWO_GROUPS),
                passes("square", {"tensor": 2}, TOGETHER["square"]),
                passes("two_parts", {"context": 2}, TOGETHER["two_parts"]),
                passes("parts_of_pairs", {"context": 2, "tensor": 2}, TOGETHER["parts_of_pairs"]),
                [{"tensor": 2}, "image_program", vision, out / "images-square.json"],
                [{"context": 2, "tensor": 2}, "image_program", out / "qwen3_vl", out / "images-parts_of_pairs.json"],
                experts("experts_of_four", {}, out / "of-experts_of_four"),
                experts("experts_in_groups", {"replicate": 2}),
                experts("experts_of_all", {"expert": 4}, out / "of-experts_of_all", out / "of-experts_of_four"),
                experts("experts_of_parts", {"context": 2}),
            ],
        ),
        (
            1,
            [
                [{}, "rank_program", model, out / "again.json", "-", saved],
                [{}, "critic_program", model, head, out / "one-critic.json", "-", out / "two-critic"],
            ],
        ),
    )
    return {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}


@pytest.fixture(scope="module")
def results(of_all_programs: dict[str, Any]) -> dict[str, Any]:
    return {name: of_all_programs[name] for name in (*CHAIN, *OF_EXPERTS, "again")}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        *(("two", case) for case in EXACT),
        *(("one", case) for case in ON_ONE_RANK),
        *(("four", case) for case in IN_TWO_GROUPS),
        *((ranks, case) for ranks, cases in TOGETHER.items() for case in cases),
        *((ranks, case) for ranks, cases in OF_EXPERTS.items() for case in cases),
    ],
)
def test_ranks_compute_what_one_process_computes(results: dict[str, Any], ranks: str, case: str) -> None:
    result = results[ranks][case]
    actual, expected = result["ranks"], result["one"]
    # a pair adds up in another order what one rank adds up at once; gradients of a new adapter are small differences
    assert result["gradients"] < (1e-4 if ranks in TOGETHER or ranks in OF_EXPERTS else 1e-5)
    assert result["weights"] < 1e-4  # Adam divides by the gradient's size
    # layers that keep a state pass rounding on from token to token; routers of some models amplify it
    near = 1e-4 if case.startswith((*HYBRIDS, *MIXTURES)) else 1e-5
    for update, of_one in zip(actual["updates"], expected["updates"], strict=True):
        correction, of_one_correction = update.pop("correction"), of_one.pop("correction")
        assert update.pop("logprobs") == pytest.approx(of_one.pop("logprobs"), abs=near)
        experts = update.pop("experts")
        assert experts == pytest.approx(of_one.pop("experts"), abs=near)
        assert ("experts/aux_loss" in experts) == (case == "experts")
        assert update.pop("teacher") == pytest.approx(of_one.pop("teacher"), abs=near)
        assert update.pop("selection") == pytest.approx(of_one.pop("selection"), abs=near)
        assert update == pytest.approx(of_one, abs=near, rel=near)
        assert correction == pytest.approx(of_one_correction, abs=near, rel=near)
    assert actual["updates"][0]["grad_norm"] > 0
    assert actual["scores"] == pytest.approx(expected["scores"], abs=near)
    for name in ("fingerprint", "base", "reference", "teachers"):
        assert actual[name] == expected[name]
    assert actual["micro_batches"] == expected["micro_batches"]
    assert actual["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=near)
    assert actual["loss"] == pytest.approx(expected["loss"], abs=near)


@pytest.mark.cluster
@pytest.mark.parametrize(("ranks", "case"), [*(("two", case) for case in ROUNDED), ("pair", "autocast")])
def test_ranks_in_bfloat16_differ_by_rounding(results: dict[str, Any], ranks: str, case: str) -> None:
    result = results[ranks][case]
    actual, expected = (result[name]["updates"][0] for name in ("ranks", "one"))
    assert result["weights"] < 5e-3
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
    assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-3)
    assert actual["tokens"] == expected["tokens"]


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [*CHAIN, "experts_of_four", "experts_of_all"])
def test_ranks_and_one_process_go_on_with_each_others_state(results: dict[str, Any], ranks: str) -> None:
    losses = results[ranks]["resumed"]
    assert losses["expected"][0] != losses["expected"][1]
    assert losses["from_one"] == pytest.approx(losses["expected"], abs=1e-6)
    assert losses["in_one"] == pytest.approx(losses["expected"], abs=1e-6)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        ("one", 1.0),
        ("two", 0.5),
        ("four", 0.5),
        ("pair", 0.5),
        ("parts", 0.5),
        ("square", 0.25),
        ("two_parts", 0.25),
        ("parts_of_pairs", 0.25),
        ("experts_of_four", 0.25),
        ("experts_of_all", 0.25),
    ],
)
def test_a_group_of_ranks_has_the_complete_model(results: dict[str, Any], ranks: str, part: float) -> None:
    assert results[ranks]["resumed"]["part"] == pytest.approx(part, abs=0.01)


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", ["parts", "two_parts"])
def test_each_rank_keeps_the_activations_of_its_tokens(results: dict[str, Any], ranks: str) -> None:
    complete, *parts = results[ranks]["kept"]
    assert max(parts) < 0.55 * complete


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        ("two", [[0], [1]]),
        ("four", [[0], [1], [0], [1]]),
        ("pair", [[0], [0, 1]]),  # both have the norms of layers
        ("square", [[0], [0, 1], [1, 2], [1, 3]]),
    ],
)
def test_ranks_with_the_same_part_of_a_weight_have_the_same_number(
    results: dict[str, Any], ranks: str, numbers: list[list[int]]
) -> None:
    assert results[ranks]["numbers"] == numbers


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [name for name in (*CHAIN, *OF_EXPERTS) if name != "one"])
def test_cluster_timeout_is_that_of_all_groups_in_which_ranks_compute(results: dict[str, Any], ranks: str) -> None:
    limits = results[ranks]["time_limits"]
    assert limits == [[1700.0]] * len(limits)  # torch's own are 1,800 and 600


@pytest.mark.cluster
def test_ranks_add_gradients_of_micro_batches_up_in_the_type_of_the_option(results: dict[str, Any]) -> None:
    """In bfloat16, 2 (1 of each rank) is lost beside 512. Sums over a whole batch are float32 before the ranks add them up."""
    assert results["two"]["sums"] == {"micro_batch": [512.0, 552.0], "batch": [552.0, 552.0]}


@pytest.mark.cluster
def test_ranks_go_on_with_master_weights_that_the_saved_run_did_not_have(results: dict[str, Any]) -> None:
    assert results["two"]["with_masters"] == pytest.approx(results["two"]["resumed"]["expected"], abs=1e-6)


@pytest.mark.cluster
def test_a_part_that_one_rank_cannot_read_is_the_same_error_on_all_ranks(results: dict[str, Any]) -> None:
    first, second = results["two"]["damaged"]
    assert first == second
    assert "damaged cannot be read (FileNotFoundError" in first


@pytest.mark.cluster
def test_a_rank_that_the_others_wait_for_is_found(results: dict[str, Any]) -> None:
    slow = results["two"]["slow"]
    assert (slow["rank"], slow["place"]) == (1, socket.gethostname())
    assert slow["times"] > 3.0
    assert slow["metrics"] == {"ranks/slowest": slow["times"], "ranks/slowest_rank": 1}


@pytest.mark.cluster
def test_ranks_with_other_versions_or_another_directory_are_refused(results: dict[str, Any]) -> None:
    versions, source, folder = results["two"]["machines"]
    assert versions[0] == versions[1]
    assert source[0] == source[1]
    assert folder[0] == folder[1]
    assert re.fullmatch(r"trainer rank 0 \(.*\) has torch .*, and rank 0 has 1\.0: install .*", versions[0])
    assert re.search(r"has turnwise .* \(source .{8}\), and rank 0 has 0\.1\.0 \(source 00000000\): install", source[0])
    assert re.match(r"trainer rank 0 \(.*\) does not see what rank 0 writes into /a: output must be in", folder[0])


def test_checkouts_of_one_version_are_told_apart(tmp_path: Path) -> None:
    contents = {"same": b"a = 1\n", "other": b"a = 2\n", "line_ends": b"a = 1\r\n"}
    for name, content in contents.items():
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "module.py").write_bytes(content)
    same, other, line_ends = (source_checksum(tmp_path / name) for name in contents)
    assert same == line_ends != other
    assert source_version().endswith(f"(source {source_checksum(Path(turnwise.__file__).parent)})")


def test_a_state_without_its_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the parts of weights and optimizer in .* cannot be read \(FileNotFoundError"):
        complete_state(tmp_path, ["weight"])


def test_a_state_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp_save.save({"steps": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(RunError, match=r"the parts of weights and optimizer in .* cannot be read \(FileNotFoundError"):
        complete_state(tmp_path, [])


@pytest.mark.cluster
def test_another_number_of_ranks_goes_on_with_a_saved_state(results: dict[str, Any]) -> None:
    for before, after in (*itertools.pairwise((*CHAIN, "again")), ("experts_of_four", "experts_of_all")):
        assert results[after]["from_other_ranks"] == pytest.approx(results[before]["resumed"]["expected"], abs=1e-6)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "optimizer", "tolerance"),
    [
        ("two", "eight_bits", 2e-3),
        ("two", "kahan", 1e-3),
        ("two", "stochastic", 2e-3),
        ("pair", "eight_bits", 2e-3),
        ("pair", "stochastic", 2e-3),
    ],
)
def test_optimizers_that_save_memory_go_on_with_their_state(
    results: dict[str, Any], ranks: str, optimizer: str, tolerance: float
) -> None:
    losses = results[ranks]["optimizers"][optimizer]
    assert losses["expected"][0] > losses["expected"][1] + tolerance
    for name in ("from_one", "in_one"):  # the parts of two ranks have other blocks of 8 bits, and other random numbers
        assert losses[name] == pytest.approx(losses["expected"], abs=tolerance)
    assert losses["here"] == pytest.approx(losses["expected"], abs=1e-6)


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ([8, 3, 7, 2, 1], 2, [[0, 3, 4], [2, 1]]),
        ([5], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([4, 4, 4, 4], 4, [[0], [1], [2], [3]]),
    ],
)
def test_micro_batches_are_shared_out_in_the_fewest_rounds(
    sizes: list[int], ranks: int, shares: list[list[int]]
) -> None:
    assert share_out(sizes, ranks) == shares


def test_a_bound_is_remembered_for_the_same_ranks_and_gpus_only(tmp_path: Path) -> None:
    def bound(place: str, model: str = "policy", file: Path | None = tmp_path / FILE) -> RememberedBound:
        return RememberedBound(file, model, "A card", place)

    def exceed(bound: RememberedBound, sequences: int) -> MicroBatchTooLarge:
        micro: Any = SimpleNamespace(token_ids_BL=torch.zeros((1, 600)), sequences=dict.fromkeys(range(sequences)))
        with pytest.raises(MicroBatchTooLarge) as raised, bound.during(micro):
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return raised.value

    assert bound("two ranks").tokens() is None
    error = exceed(bound("two ranks"), 3)
    assert error.again
    assert "the memory of A card ran out in a micro-batch of 600 tokens (Tried to allocate 2 GiB)" in str(error)
    assert (bound("two ranks").tokens(), bound("two ranks", "critic").tokens()) == (300, None)
    exceed(bound("two ranks", "critic"), 3)
    assert (bound("two ranks").tokens(), bound("two ranks", "critic").tokens()) == (300, 300)
    alone = exceed(bound("two ranks"), 1)
    assert not alone.again
    assert "one sequence of 600 tokens, which cannot be divided" in str(alone)
    assert bound("two ranks").tokens() == 300
    assert bound("four ranks").tokens() is None
    unwritten = exceed(bound("two ranks", file=tmp_path / "nothing" / FILE), 3)
    assert not unwritten.again
    assert "Set micro_batch_tokens=300: " in str(unwritten)
    assert not exceed(bound("two ranks", file=None), 3).again
    (tmp_path / FILE).write_text("{")
    assert bound("two ranks").tokens() is None


def test_ranks_say_why_they_use_no_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reason = "CUDA_VISIBLE_DEVICES='' hides all GPUs"
    monkeypatch.setattr(rank_groups, "why_no_gpu", lambda: reason)
    monkeypatch.setattr(rank_groups, "sees_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"model.device=cuda cannot be used: {reason}"):
        rank_groups._device("cuda", 0)
    assert [rank_groups._device("auto", local).type for local in (0, 1)] == ["cpu", "cpu"]
    (message,) = (record.getMessage() for record in caplog.records)  # of the first rank of a machine
    assert message.endswith(f"although this machine has a GPU's driver: {reason}")


def test_a_probe_finds_the_device_where_a_rank_computes_whatever_keeps_its_parts() -> None:
    """With cluster.fsdp.offload=cpu, parts are on the CPU, and complete weights on the GPU. Probes make their inputs on
    `model.device`, that of the first parameter: in a probe it is the complete embedding, on the device of the mesh."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = tiny_model(vocabulary=50)
        sharded = ShardedModel(model, MeshOfRanks.of("cpu", 1, 2, 1, 1, 1), FsdpSection())

        def first() -> tuple[bool, bool]:
            parameter = next(model.parameters())
            return parameter is model.get_input_embeddings().weight, isinstance(parameter, DTensor)

        assert sharded.probe(first) == (True, False)
        assert first() == (True, True)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dimension", ["shard", "tensor", "expert"])
def test_divided_layers_are_computed_again_in_the_backward_pass(
    dimension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a large model on a CPU have forward passes of their own, which divided ones must not have."""
    monkeypatch.setattr(allocator, "LARGE_MODEL", 0)
    sizes = {name: 1 + (name == dimension) for name in ("tensor", "expert")}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model: Any = mixture("qwen3_moe") if dimension == "expert" else tiny_model()
        recompute_layers(model)
        with_fast_layers(model)
        mesh = MeshOfRanks.of("cpu", 1, 2 // sizes["tensor"], 1, sizes["tensor"], sizes["expert"])
        sharded = ShardedModel(model, mesh, FsdpSection())
        norms = [layer.post_attention_layernorm for layer in model.model.layers]
        # the values of ranks with whole layers are those of this module
        assert [isinstance(vars(norm).get("forward"), functools.partial) for norm in norms] == [
            dimension == "shard" for _ in norms
        ]
        calls: list[Any] = []
        for norm in norms:
            norm.register_forward_pre_hook(lambda module, args: calls.append(module))
        total = sharded.run(lambda: model(torch.arange(8)[None], use_cache=False).logits.sum())
        assert calls == norms
        total.backward()
        assert calls == [*norms, *reversed(norms)]
    finally:
        torch.distributed.destroy_process_group()


# A critic on several ranks has the values, losses and gradients of one process, and goes on with what another number
# saved.


CRITIC_EXACT = ["all weights", "lora", "clip", "one micro-batch"]
CRITIC_TOGETHER = ["all weights", "lora"]


def save_head(model: Path, folder: Path) -> Path:
    """The head of a critic, with values that differ."""
    generator = torch.Generator().manual_seed(1)
    width = AutoConfig.from_pretrained(model).hidden_size
    folder.mkdir()
    head = {"weight": torch.randn((1, width), generator=generator) * 0.3, "bias": torch.tensor([0.25])}
    save_file(head, folder / "value_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def critic_results(of_all_programs: dict[str, Any]) -> dict[str, Any]:
    results = {name: of_all_programs[f"{name}-critics"] for name in ("two", "pair", "parts")}
    return {**results, "one": of_all_programs["one-critic"]}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ranks", "case"),
    [*(("two", case) for case in CRITIC_EXACT), *itertools.product(("pair", "parts"), CRITIC_TOGETHER)],
)
def test_two_ranks_compute_what_one_process_computes(critic_results: dict[str, Any], ranks: str, case: str) -> None:
    result = critic_results[ranks][case]
    actual, expected = result["ranks"], result["one"]
    assert result["gradients"] < (1e-5 if ranks == "two" else 1e-4)
    assert actual["values"] == pytest.approx(expected["values"], abs=1e-5)
    assert max(expected["values"]) - min(expected["values"]) > 0.1
    for update, of_one in zip(actual["updates"], expected["updates"], strict=True):
        assert update == pytest.approx(of_one, abs=1e-4, rel=1e-4)
    assert actual["base"] == expected["base"]
    assert actual["micro_batches"] == expected["micro_batches"]


@pytest.mark.cluster
def test_two_ranks_in_bfloat16_differ_by_rounding(critic_results: dict[str, Any]) -> None:
    actual, expected = (critic_results["two"]["bfloat16"][name] for name in ("ranks", "one"))
    assert actual["values"] == pytest.approx(expected["values"], abs=0.05)
    assert actual["updates"][0] == pytest.approx(expected["updates"][0], rel=0.1, abs=0.01)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["all", "lora"])
def test_two_ranks_one_rank_and_one_process_go_on_with_each_others_critic(
    critic_results: dict[str, Any], kind: str
) -> None:
    losses = critic_results["two"]["resumed"][kind]
    assert losses["expected"][0] != losses["expected"][1]
    for name in ("from_one", "in_one"):
        assert losses[name] == pytest.approx(losses["expected"], abs=1e-5)
    assert critic_results["one"]["from_other_ranks"][kind] == pytest.approx(losses["expected"], abs=1e-5)


# Two ranks compute the losses, gradients and weights of one process on conversations with images.


@pytest.mark.cluster
@pytest.mark.parametrize(
    "ranks",
    [
        "images",
        "images-pair",
        "images-qwen2_vl",
        "images-qwen3_vl",
        "images-square",
        "images-context",
        "images-context-qwen3_vl",
        "images-parts_of_pairs",
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        "images on both ranks",
        "images on one rank",
        "images on one rank, gradients added up after each micro-batch",
        "no images",
    ],
)
def test_ranks_compute_what_one_process_computes_with_images(
    of_all_programs: dict[str, Any], ranks: str, case: str
) -> None:
    result = of_all_programs[ranks][case]
    assert result["ranks"] == pytest.approx(result["one"], abs=1e-5, rel=1e-5)
    assert result["gradients"] < 1e-5
    assert result["weights"] < 1e-4  # Adam divides by the gradient's size
    assert (result["vision"] > 0) == (case != "no images")


# A rank needs the memory of its part of a model while the model is loaded, and not that of the complete model.


MEGABYTE = 2**10
"""Kilobytes."""


def peaks(path: Path, out: Path, *meshes: Mesh) -> list[list[tuple[int, int, int]]]:
    """Of each process of one rank, and of two, four, ... ranks on these meshes, in kilobytes: the peak of its memory, beyond its
    memory before the model was loaded, what it has read of the weights, and the most memory in which it gives weights to
    servers."""
    sizes = [2 ** (1 + number) for number in range(len(meshes))]

    def program(size: int, mesh: Mesh) -> World:
        kind = "sharded" if size > 1 else "complete"
        return size, [[mesh, "memory_program", path.parent / "small", path, kind, out / f"{size}-"]]

    run_ranks(program(1, {}), *map(program, sizes, meshes))
    return [[tuple(json.loads((out / f"{size}-{rank}").read_text())) for rank in range(size)] for size in (1, *sizes)]


@pytest.mark.cluster
def test_each_rank_reads_and_has_its_part_of_the_model_only_and_gives_it_to_servers_by_layers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    config = Qwen2Config(**sizes, num_hidden_layers=16, num_key_value_heads=8, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 // 2**10
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * 4 // 2**10
    model.save_pretrained(tmp_path / "model", max_shard_size="100MB")
    small = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
    Qwen2ForCausalLM(small).save_pretrained(tmp_path / "small")
    ((complete, read, _),), *of_worlds = peaks(tmp_path / "model", tmp_path, {}, {"tensor": 2})
    assert complete > size
    assert read == size
    for of_ranks in of_worlds:
        ranks = len(of_ranks)
        assert 0 < of_ranks[0][2] < 6 * layer < 0.4 * size  # never the complete model
        for peak, read, _ in of_ranks:
            # norms are on both ranks of a pair; gloo has parts of the layer that is gathered beside the complete layer
            assert size / ranks <= read < 1.01 * size / ranks
            assert peak < size / ranks + 6 * layer  # buffers: 5.2 layers on a busy machine
            assert peak < 0.8 * complete


# The predicted memory of a rank is what each of two ranks needs, with and without the embedded engine.


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


HALVED = ["param_dtype=bfloat16"] if torch.backends.cpu.get_cpu_capability() == "AVX512" else []
"""Other processors have no products in bfloat16: there, this step took more than ten minutes, and is measured in float32."""


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "fsdp"), [("all", HALVED), ("lora", [])])
def test_the_prediction_is_what_each_rank_needs(kind: str, fsdp: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from memory import CONVERSATIONS, PROMPT_TOKENS, TOKENS, measure_ranks, options, shape_of  # type: ignore[import-not-found]

    args = argparse.Namespace(
        size="30m",
        dtype="float32",
        gradient_checkpointing=False,
        micro_batches=2,
        micro_batch_tokens=0,
        ranks=2,
        fsdp=fsdp,
    )
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    measured = [found["gib"] for found in measure_ranks(kind, args)]
    config = Config.model_validate(options(args.size, kind, args))
    workload = Workload(conversations=CONVERSATIONS, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS, equal=True)
    predicted = [rank_memory(config, shape_of(args.size), workload, 2, rank=rank).gib for rank in range(2)]
    assert predicted == pytest.approx(measured, rel=0.15)
