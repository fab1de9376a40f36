"""Training on what was seen: the trainer's log-probabilities are the engine's and the model's own, and the eyes learn too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engines.test_local_vision import PAD, converse, heard, own_logprobs
from support.vision import picture, save_vision_model, vision_model, vision_tokenizer
from turnwise.chat.media import MediaProcessor
from turnwise.engines.local import LocalEngine
from turnwise.errors import TurnwiseError
from turnwise.models.loading import ModelOptions, load_model
from turnwise.options.algorithm import PpoClip
from turnwise.training.batch import MicroBatch, pack
from turnwise.training.checkpoint import Checkpoints
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.types import Completion, LogprobKind, Row, Sampling, Segment, Trajectory, Turn


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    found = MediaProcessor.from_pretrained(save_vision_model(tmp_path_factory.mktemp("model")), vision_tokenizer())
    assert found is not None
    return found


def trajectory(segment: Segment, advantages: list[float], name: str = "a") -> Trajectory:
    turns = []
    for index in range(len(advantages)):
        places = [place for place, turn in enumerate(segment.turn) if turn == index]
        said = Completion(
            token_ids=[segment.token_ids[place] for place in places],
            logprobs=[segment.logprobs[place] for place in places],
            versions=[0] * len(places),
            finish_reason="length",
            logprob_kind=LogprobKind.SAMPLED,
        )
        turns.append(Turn(index=index, message={"role": "assistant", "content": ""}, text="", completion=said))
    row = Row(id="1", messages=[{"role": "user", "content": "?"}])
    return Trajectory(id=name, group="1", row=row, turns=turns, segments=[segment], advantages=advantages)


def held(model: torch.nn.Module, vision: MediaProcessor, *, threads: int = 1) -> list[Segment]:
    """Three conversations: two with images, of two turns, and one without any."""
    engine = LocalEngine(model, threads=threads)  # type: ignore[arg-type]
    same = heard(vision, "look", picture(16, 24, seed=1))
    turns = [
        [same, heard(vision, picture(32, 16, seed=2), "and", picture(8, 8, seed=3))],
        [same, heard(vision, "no image now")],
        [heard(vision, "words"), heard(vision, "and more words, many more words")],
    ]

    async def hold() -> list[Segment]:
        return await asyncio.gather(*(converse(engine, str(n), one, seed=10 * n) for n, one in enumerate(turns)))

    return asyncio.run(hold())


def policy(model: torch.nn.Module, **options: float) -> LocalLearner:
    return LocalLearner(model, sampling=Sampling(), loss=make_loss(PpoClip(**options)), threads=1)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_trainer_the_engine_and_the_model_itself_agree(vision: MediaProcessor, share_prompts: bool) -> None:
    model = vision_model()
    segments = held(model, vision)
    one = policy(model)
    assert one.requirements.share_prompts  # text goes in trees even here
    packed = pack(
        [trajectory(segment, [1.0, -0.5], str(n)) for n, segment in enumerate(segments)], share_prompts=share_prompts
    )
    assert sum(micro.tree is None for micro in packed.micro_batches) == 1
    for micro in packed.micro_batches:
        with torch.no_grad():
            logprob_N, _ = one._forward.logprobs(micro)
        torch.testing.assert_close(logprob_N, micro.targets.behaviour_logprob_N, atol=1e-4, rtol=0)
    for segment in segments:
        (micro,) = pack([trajectory(segment, [1.0, -0.5])], share_prompts=share_prompts).micro_batches
        with torch.no_grad():
            assert one._forward.logprobs(micro)[0].tolist() == pytest.approx(own_logprobs(model, segment), abs=1e-4)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_critic_reads_images(vision: MediaProcessor, share_prompts: bool) -> None:
    """The value of each state is that of the model's own forward pass over the segment with its images."""
    model = vision_model()
    segments = held(model, vision)
    critic = LocalCritic(model, threads=1)
    with torch.no_grad():
        critic._head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    trajectories = [trajectory(segment, [1.0, -0.5], str(n)) for n, segment in enumerate(segments)]
    packing = ValuePacking(level="token", micro_batch_tokens=2048, share_prompts=share_prompts)
    set_values(trajectories, asyncio.run(critic.values(pack_states(trajectories, packing))), "token")
    for one, segment in zip(trajectories, segments, strict=True):
        ids = torch.tensor([list(segment.token_ids)])
        given = {"input_ids": ids}
        if segment.media:
            given["mm_token_type_ids"] = torch.zeros_like(ids)
            for media in segment.media:
                given["mm_token_type_ids"][0, media.start : media.start + media.length] = 1
            for name in ("pixel_values", "image_grid_thw"):
                given[name] = torch.cat([media.inputs[name] for media in segment.media])
        with torch.no_grad():
            hidden_TD = model(**given, output_hidden_states=True).hidden_states[-1][0]
            value_T = critic._head(hidden_TD)[:, 0]
        expected = [float(value_T[place - 1]) for place, turn in enumerate(segment.turn) if turn >= 0]
        assert [number for entry in one.values for number in entry] == pytest.approx(expected, abs=1e-4)  # type: ignore[union-attr]
        one.returns = [[1.0] * len(entry) for entry in one.values]  # type: ignore[arg-type]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    asyncio.run(critic.update([pack_value_targets(trajectories, packing)], lr=1e-2))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("visual" in name for name in changed)
    assert any("layers" in name and "visual" not in name for name in changed)


def test_a_step_moves_the_words_and_the_eyes(vision: MediaProcessor) -> None:
    model = vision_model()
    segments = held(model, vision)
    one = policy(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batch = pack([trajectory(segment, [1.0, -0.5], str(n)) for n, segment in enumerate(segments)])
    update = asyncio.run(one.update([batch], lr=1e-2))
    assert update.max_deviation < 1e-3
    assert update.tokens == 3 * 2 * 12
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    for part in ("visual.patch_embed", "visual.blocks.0", "visual.merger", "language_model.layers.1", "lm_head"):
        assert any(part in name for name in moved), part


def test_small_micro_batches_side_by_side_and_a_reference_give_the_same_step(vision: MediaProcessor) -> None:
    gradients = []
    for size in (8192, 1):
        model = vision_model()
        segments = held(model, vision)
        one = LocalLearner(
            model, sampling=Sampling(), loss=make_loss(PpoClip(kl_coef=0.1)), threads=0 if size == 1 else 1
        )
        batch = pack(
            [trajectory(segment, [1.0, -0.5], str(n)) for n, segment in enumerate(segments)], micro_batch_tokens=size
        )
        asyncio.run(one.update([batch], lr=0.0))
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-3)


def test_a_group_that_sees_the_same_is_computed_once_and_with_another_image_twice(vision: MediaProcessor) -> None:
    def rows(*seeds: int) -> int:
        segments = []
        for seed in seeds:
            segment = Segment()
            segment.append_context(*heard(vision, "look", picture(seed=seed)))
            said = Completion(
                token_ids=[9, 2],
                logprobs=[-1.0, -2.0],
                versions=[0, 0],
                finish_reason="stop",
                logprob_kind=LogprobKind.SAMPLED,
            )
            segment.append_completion(0, said)
            segments.append(segment)
        packed = pack([trajectory(segment, [1.0], str(n)) for n, segment in enumerate(segments)])
        (micro,) = packed.micro_batches
        assert float(micro.targets.weight_N.sum()) == pytest.approx(1.0)
        return len(micro.token_ids_BL)

    assert rows(1, 1, 1) == 1
    assert rows(1, 2, 1) == 2


def test_a_placeholder_that_was_said_is_trained_on_as_a_word(vision: MediaProcessor) -> None:
    model = vision_model(seed=5)
    with torch.no_grad():
        model.lm_head.weight[PAD] *= 40
    segments = held(model, vision)
    assert any(token == PAD and turn == 0 for token, turn in zip(segments[0].token_ids, segments[0].turn, strict=True))
    update = asyncio.run(policy(model).update([pack([trajectory(segments[0], [1.0, 1.0])])], lr=1e-2))
    assert update.max_deviation < 1e-3


def test_what_was_seen_after_the_last_word_is_left_out(vision: MediaProcessor) -> None:
    segment = Segment()
    segment.append_context(*heard(vision, "look", picture(seed=1)))
    said = Completion(
        token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason="stop", logprob_kind=LogprobKind.SAMPLED
    )
    segment.append_completion(0, said)
    segment.append_context(*heard(vision, "and this", picture(seed=2)))
    (micro,) = pack([trajectory(segment, [1.0])]).micro_batches
    assert [len(media) for media in micro.media_B] == [1]


def test_a_model_that_only_reads_is_not_trained_on_images(vision: MediaProcessor) -> None:
    from support.tiny import tiny_model

    segments = held(vision_model(), vision)
    micro: MicroBatch = pack([trajectory(segments[0], [1.0, 1.0])]).micro_batches[0]
    with pytest.raises(TurnwiseError, match="images, which Qwen3ForCausalLM does not accept"):
        policy(tiny_model(vocabulary=263))._forward.logprobs(micro)


def test_a_checkpoint_of_a_model_that_sees_is_a_model_directory(tmp_path: Path) -> None:
    source = save_vision_model(tmp_path / "model")
    model = load_model(ModelOptions(path=source, dtype="float32", device="cpu"))
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    tokenizer = AutoTokenizer.from_pretrained(source)
    seen = MediaProcessor.from_pretrained(source, tokenizer)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, save_model=model.save_pretrained, tokenizer=tokenizer, state={}, processor=seen)
    again = load_model(ModelOptions(path=checkpoints.newest, dtype="float32", device="cpu"))
    assert torch.equal(again.model.visual.patch_embed.proj.weight, model.model.visual.patch_embed.proj.weight)
    found = MediaProcessor.from_pretrained(checkpoints.newest, AutoTokenizer.from_pretrained(checkpoints.newest))
    assert found is not None
    (one,) = found.expand(
        "<|image_pad|>", found.parts([{"role": "user", "content": [{"type": "image", "image": picture()}]}])
    )[1]
    assert one.length == 4
