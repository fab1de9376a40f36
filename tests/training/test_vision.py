"""Training on what was seen: exact log-probabilities and gradients, and families that expand images in their own ways."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers as hf
from transformers import AutoTokenizer

from engines.test_local_forward import PAD, converse, heard, said_logprobs
from engines.test_local_forward import ask_seen as ask
from engines.test_local_forward import own_logprobs_seen as own_logprobs
from support.mixtures import disturb_routers
from support.training import train_silently
from support.vision import (
    MARKS,
    TEMPLATE,
    image_part,
    image_processor,
    picture,
    save_picture_recipe,
    save_vision_model,
    text_part,
    vision_model,
    vision_tokenizer,
)
from training.test_flash_tree import Threads
from turnwise.chat.media import MediaProcessor
from turnwise.config.recipe import load
from turnwise.data.images import digest, load_image
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.forward import VisionForward
from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.models.loading import ModelSource, load_model
from turnwise.models.model_config import images_see_themselves, refuse_uncut
from turnwise.models.precision import autocast as bfloat16_autocast
from turnwise.models.vision import VisionAdapter, own_tokens
from turnwise.options.algorithm import PpoClip
from turnwise.train import TrainingRun, assemble
from turnwise.training.batch import MicroBatch, pack
from turnwise.training.checkpoint import Checkpoints
from turnwise.training.forward import ModelInputs, try_tree_attention
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.sharded import together
from turnwise.training.sharded.together import Cut
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets, set_values
from turnwise.types import Completion, LogprobKind, Media, Request, Row, Sampling, Segment, Trajectory, Turn

# Training on what was seen: the trainer's log-probabilities are the engine's and the model's own, and the eyes learn
# too.


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
    model = load_model(ModelSource(path=str(source), device="cpu"))
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    tokenizer = AutoTokenizer.from_pretrained(source)
    seen = MediaProcessor.from_pretrained(source, tokenizer)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, save_model=model.save_pretrained, tokenizer=tokenizer, state={}, processor=seen)
    again = load_model(ModelSource(path=str(checkpoints.newest), device="cpu"))
    assert torch.equal(again.model.visual.patch_embed.proj.weight, model.model.visual.patch_embed.proj.weight)
    found = MediaProcessor.from_pretrained(checkpoints.newest, AutoTokenizer.from_pretrained(checkpoints.newest))
    assert found is not None
    (one,) = found.expand(
        "<|image_pad|>", found.parts([{"role": "user", "content": [{"type": "image", "image": picture()}]}])
    )[1]
    assert one.length == 4


# Other families that see: expanded by their own processors, exact over the slots and in training, or refused.


models: Any = hf
"""transformers, for what its stubs do not say."""

TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

EYES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer(image: str, *others: str) -> hf.PreTrainedTokenizerFast:
    made = vision_tokenizer(TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image))
    made.add_tokens([image, *others], special_tokens=True)
    return made


EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def qwen_eyes(family: str, text: Mapping[str, Any], **vision: Any) -> tuple[Any, ...]:
    """A model of Qwen's families: positions on three axes."""
    made = vision_tokenizer()
    start, end, image, video = made.convert_tokens_to_ids(list(MARKS))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = getattr(models, f"{family}Config")(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope, **text},
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            **vision,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return getattr(models, f"{family}ForConditionalGeneration")(config), made, image_processor()


def qwen3_vl() -> tuple[Any, ...]:
    """Eyes that speak into several layers."""
    return qwen_eyes("Qwen3VL", {}, deepstack_visual_indexes=[0, 1])


def qwen3_vl_moe() -> tuple[Any, ...]:
    """Eyes that speak into several layers, and experts."""
    return qwen_eyes("Qwen3VLMoe", {**EXPERTS, "decoder_sparse_step": 1}, deepstack_visual_indexes=[0, 1])


HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}


def qwen3_5() -> tuple[Any, ...]:
    """Recurrent layers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    return qwen_eyes("Qwen3_5", {**HYBRID, "rope_parameters": rope})


def qwen3_5_moe() -> tuple[Any, ...]:
    """Recurrent layers and experts."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
    experts = {**EXPERTS, "shared_expert_intermediate_size": 16}
    return qwen_eyes("Qwen3_5Moe", {**HYBRID, **experts, "rope_parameters": rope})


def llava() -> tuple[Any, ...]:
    """One size, one axis."""
    made = tokenizer("<image>")
    config = hf.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
        image_token_index=made.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(**sizes),
        made,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return hf.LlavaForConditionalGeneration(config), made, processor


def idefics3() -> tuple[Any, ...]:
    """An image becomes several, with words between them."""
    made = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    config = hf.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "image_size": 16, "patch_size": 4},
        image_token_id=made.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    images = hf.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return hf.Idefics3ForConditionalGeneration(config), made, hf.Idefics3Processor(images, made, image_seq_len=4)


def llava_onevision() -> tuple[Any, ...]:
    """An image becomes several, and processor_config.json says how many tokens each has."""
    made = tokenizer("<image>", "<video>")
    config = models.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8},
        image_token_index=made.convert_tokens_to_ids("<image>"),
        video_token_index=made.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = models.LlavaOnevisionImageProcessorPil(
        size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]]
    )
    processor = without_videos(
        models.LlavaOnevisionProcessor, images, made, num_image_tokens=4, vision_feature_select_strategy="full"
    )
    return models.LlavaOnevisionForConditionalGeneration(config), made, processor


def internvl() -> tuple[Any, ...]:
    """processor_config.json says how many tokens an image has."""
    core = tokenizer("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
    marks = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=core.chat_template,
        extra_special_tokens={**marks, "video_token": "<video>"},
    )
    config = models.InternVLConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=made.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    images = models.GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=False)
    processor = without_videos(models.InternVLProcessor, images, made, image_seq_length=4)
    return models.InternVLForConditionalGeneration(config), made, processor


def smolvlm() -> tuple[Any, ...]:
    """Its class asks for a part for videos; an image becomes several."""
    made = tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>")
    config = models.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**EYES, "image_size": 16, "patch_size": 4},
        image_token_id=made.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    images = models.SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return (
        models.SmolVLMForConditionalGeneration(config),
        made,
        without_videos(models.SmolVLMProcessor, images, made, image_seq_len=4),
    )


def without_videos(family: Any, images: Any, reader: Any, **said: Any) -> Any:
    """A processor as a model directory has it, saved on a machine that needs no torchvision."""
    others = ["image_processor", "tokenizer"]
    made: Any = type(family.__name__, (family,), {"get_attributes": classmethod(lambda cls: others)})
    return made(images, reader, video_processor=None, **said)


def gemma3() -> tuple[Any, ...]:
    """The tokens of an image see all of it, also what comes after them."""
    core = tokenizer("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=core.chat_template,
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    config = hf.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "layer_types": ["full_attention"] * 2},
        vision_config={**EYES, "image_size": 16, "patch_size": 4},
        image_token_id=made.convert_tokens_to_ids("<image_soft_token>"),
        mm_tokens_per_image=4,
    )
    images = hf.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
    return hf.Gemma3ForConditionalGeneration(config), made, hf.Gemma3Processor(images, made, image_seq_length=4)


def saved(make: Callable[[], tuple[Any, ...]], path: Path) -> tuple[Any, MediaProcessor]:
    """Through a model directory, as users have it."""
    torch.manual_seed(0)
    for part in make():
        part.save_pretrained(path)
    found = MediaProcessor.from_pretrained(path, hf.AutoTokenizer.from_pretrained(path))
    assert found is not None
    return load_model(ModelSource(path=str(path), device="cpu")), found


def hear(segment: Segment, vision: MediaProcessor, *parts: Any) -> None:
    messages = [{"role": "user", "content": list(parts)}]
    reader = vision.processor.tokenizer
    text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, found = vision.expand(text, vision.parts(messages))
    ids = reader.encode(text, add_special_tokens=False)
    segment.append_context(ids, vision.locate(ids, found))


@pytest.mark.parametrize(
    ("make", "pads"),
    [
        (qwen3_vl, [4, 2]),
        pytest.param(qwen3_vl_moe, [4, 2], marks=pytest.mark.slow),
        (qwen3_5, [4, 2]),
        pytest.param(qwen3_5_moe, [4, 2], marks=pytest.mark.slow),
        (llava, [4, 4]),
        (idefics3, [20, 12]),
        (llava_onevision, [10, 10]),
        (internvl, [4, 12]),
        (smolvlm, [20, 12]),
    ],
)
def test_engine_and_trainer_agree(make: Callable[[], tuple[Any, ...]], pads: list[int], tmp_path: Path) -> None:
    model, vision = saved(make, tmp_path)
    engine, segment = LocalEngine(model, threads=1), Segment()
    forward = engine._core.forward
    assert isinstance(forward, VisionForward)
    assert forward.fused is not None

    async def hold() -> None:
        for turn in range(2):
            hear(segment, vision, text_part("look"), image_part(picture(16, (16, 8)[turn], seed=turn)), text_part("?"))
            segment.append_completion(turn, await ask(engine, "c", segment, seed=turn, tokens=8))

    asyncio.run(hold())
    pad = vision.token_ids["image"]
    spans = [segment.token_ids[one.start : one.start + one.length] for one in segment.media]
    assert [list(span).count(pad) for span in spans] == pads
    policy = LocalLearner(model, sampling=Sampling(), threads=1)
    update = asyncio.run(policy.update([pack([trajectory(segment, [1.0, -1.0])])], lr=1e-3))
    assert update.max_deviation < 1e-4
    assert update.grad_norm > 0
    eyes = [parameter for name, parameter in model.named_parameters() if "vision" in name or "visual" in name]
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in eyes)


@pytest.mark.parametrize(
    "make",
    [
        qwen3_vl,
        qwen3_5,
        llava,
        pytest.param(qwen3_vl_moe, marks=pytest.mark.slow),
        pytest.param(qwen3_5_moe, marks=pytest.mark.slow),
        pytest.param(idefics3, marks=pytest.mark.slow),
        pytest.param(llava_onevision, marks=pytest.mark.slow),
        pytest.param(internvl, marks=pytest.mark.slow),
        pytest.param(smolvlm, marks=pytest.mark.slow),
    ],
)
def test_rows_with_images_are_cut_into_the_parts_of_ranks(
    make: Callable[[], tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank computes all images, and its tokens of the rows. The ranks are threads."""
    model, vision = saved(make, tmp_path)
    assert not images_see_themselves(model.config)
    rows = [Segment() for _ in range(2)]
    for number, segment in enumerate(rows):
        for turn in range(2):
            hear(segment, vision, text_part("look"), image_part(picture(16, 16, seed=turn + number)), text_part("?"))
            ids = tuple(range(5, 9 + 3 * number))
            said = Completion(
                token_ids=ids,
                logprobs=(0.0,) * len(ids),
                versions=(0,) * len(ids),
                finish_reason="stop",
                logprob_kind=LogprobKind.SAMPLED,
            )
            segment.append_completion(turn, said)
    (micro,) = pack([trajectory(segment, [1.0, -1.0]) for segment in rows]).micro_batches
    inputs, weights = ModelInputs(model), list(model.parameters())

    def computed(part: MicroBatch[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with inputs.of(part) as given:
            logits_UV = model(**given).logits[part.row_U, part.column_U]
        gradients = torch.autograd.grad(logits_UV.square().sum(), weights, allow_unused=True, materialize_grads=True)
        return logits_UV.detach(), list(gradients)

    whole_UV, expected = computed(micro)
    assert try_tree_attention(model)
    ranks, cut = 2, Cut(micro.token_ids_BL.numel(), 2)
    slots, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)
    key_U = cut.key_of((micro.row_U * micro.token_ids_BL.shape[1] + micro.column_U).numpy())
    owner_U = key_U // (2 * cut.piece)
    assert set(owner_U) == {0, 1}
    monkeypatch.setattr(together, "_Keys", lambda rank, _: Threads(rank, slots, barrier))

    def of_rank(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        context: Any = SimpleNamespace(get_local_rank=lambda: rank, get_group=lambda: rank)
        part = together._own_tokens(micro, cast("Any", SimpleNamespace(context=context)), cut)
        own_U = torch.from_numpy(key_U[owner_U == rank] % (2 * cut.piece))
        return computed(replace(part, row_U=torch.zeros_like(own_U), column_U=own_U))

    with ThreadPoolExecutor(ranks) as threads:
        parts = list(threads.map(of_rank, range(ranks)))
    for rank, (logits_UV, _) in enumerate(parts):
        torch.testing.assert_close(logits_UV, whole_UV[torch.from_numpy(owner_U == rank)], atol=1e-4, rtol=1e-4)
    for right, *of_ranks in zip(expected, *(gradients for _, gradients in parts), strict=True):
        torch.testing.assert_close(
            torch.stack(of_ranks).sum(0), right, atol=1e-4 * max(1.0, right.abs().max().item()), rtol=1e-3
        )


def test_images_whose_tokens_see_each_other_are_not_cut(tmp_path: Path) -> None:
    model, _ = saved(gemma3, tmp_path)
    with pytest.raises(ConfigError, match=r"context=2: .* has images, whose tokens attend to later tokens of the same"):
        refuse_uncut(model.config, 2)
    assert VisionAdapter.of(model) is not None
    with (
        own_tokens(torch.arange(4)),
        pytest.raises(TurnwiseError, match="takes 'attention_mask', which cannot be divided"),
    ):
        model.get_decoder()(inputs_embeds=torch.zeros(1, 4, 32), attention_mask=torch.ones(1, 4))


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_text_and_images_of_a_hybrid_are_computed_in_two_passes_over_one_cache(
    mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text before, between and after images, alone and beside other conversations, goes through the fused pass."""
    model, vision = saved(qwen3_5, tmp_path)
    engine = LocalEngine(model, threads=1, autocast=mixed)
    forward = engine._core.forward
    assert isinstance(forward, VisionForward)
    passes: list[int] = []
    own = forward._run
    monkeypatch.setattr(
        forward,
        "_run",
        lambda kv, rows, *others, **named: (passes.append(len(rows)), own(kv, rows, *others, **named))[1],
    )

    async def hold(name: str, turns: list[list[Any]]) -> Segment:
        segment = Segment()
        for turn, parts in enumerate(turns):
            hear(segment, vision, *parts)
            segment.append_completion(turn, await ask(engine, name, segment, seed=turn, tokens=9))
        return segment

    async def all_of_them() -> list[Segment]:
        look, text = image_part(picture(32, 16)), text_part("some words before")
        return await asyncio.gather(
            hold("a", [[text, look, text], [text_part("and now?")], [image_part(picture(8, 24, seed=1))]]),
            hold("b", [[text, look, text], [text_part("other words")]]),
            hold("c", [[text_part("only words, and rather many of them")], [text_part("more")], [text, look]]),
        )

    held = asyncio.run(all_of_them())
    # the prompt that is verified, two prompts with the same image, of which one is copied, and two later images
    assert passes == [1, 1, 1, 1]
    for segment in held:
        with bfloat16_autocast(torch.device("cpu"), mixed):
            own_N = own_logprobs(model, segment)
        assert said_logprobs(segment) == pytest.approx(own_N, abs=0.06 if mixed else 1e-4)


@pytest.mark.slow
def test_recorded_experts_are_used_again_with_images(tmp_path: Path) -> None:
    model, vision = saved(qwen3_5_moe, tmp_path)
    segment = Segment()

    async def hold() -> None:
        engine = LocalEngine(model, threads=1, record_routes=True)
        for turn in range(2):
            hear(segment, vision, text_part("look"), image_part(picture(16, (16, 8)[turn], seed=turn)), text_part("?"))
            segment.append_completion(
                turn,
                await engine.generate(
                    Request(
                        conversation="c",
                        token_ids=tuple(segment.token_ids),
                        media=tuple(segment.media),
                        sampling=Sampling(max_tokens=8),
                        seed=turn,
                        routes=segment.routes,
                    )
                ),
            )

    asyncio.run(hold())
    assert segment.routes is not None
    assert len(segment.routes) == len(segment) - 1
    policy = LocalLearner(model, sampling=Sampling(), threads=1, router_replay=True)
    batch = pack([trajectory(segment, [1.0, -1.0])])
    update = asyncio.run(policy.update([batch], lr=0.0))
    assert update.max_deviation < 1e-4
    assert update.experts["experts/rerouted"] == 0.0
    disturb_routers(model)
    assert asyncio.run(policy.update([batch], lr=0.0)).experts["experts/rerouted"] > 0.1
    (micro,) = batch.micro_batches
    used: list[torch.Tensor] = []
    with torch.no_grad():
        policy._forward.logprobs(micro, on_choice=lambda choice: used.append(choice.index_TK))
    used_TLK = torch.stack(used, dim=1)
    assert micro.routes_TLK is not None
    known_T = micro.routes_TLK[:, 0, 0] >= 0
    # placeholders of images have experts, too
    assert int(known_T.sum()) == len(segment) - 1
    assert torch.equal(used_TLK[known_T], micro.routes_TLK[known_T].long())


def test_images_of_several_sizes_are_seen_and_trained_on_as_the_model_sees_them_one_by_one() -> None:
    """Pixtral. Its processor needs torchvision, so the tokens are written here as it writes them."""
    made = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    pad, line, end = made.convert_tokens_to_ids(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    torch.manual_seed(0)
    model = models.LlavaForConditionalGeneration(
        models.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**EYES, "model_type": "pixtral", "image_size": 32, "patch_size": 4, "head_dim": 16},
            image_token_index=pad,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    ).eval()
    processor = models.PixtralImageProcessorPil(size={"longest_edge": 16}, patch_size=4)

    def part(width: int, height: int) -> tuple[list[int], Media]:
        image = picture(width, height, seed=width)
        seen = processor(image, return_tensors="pt")
        assert seen["image_sizes"].tolist() == [[height, width]]
        row = [pad] * (width // 4)
        ids = [*([*row, line] * (height // 4))[:-1], end]
        return ids, Media(kind="image", start=1, length=len(ids) - 1, source=image, inputs=dict(seen))

    engine, segment = LocalEngine(model, threads=1), Segment()

    async def hold() -> None:
        for turn, (width, height) in enumerate([(16, 16), (16, 8), (8, 12)]):
            ids, media = part(width, height)
            segment.append_context([9, *ids, 10, 11], [media])
            segment.append_completion(turn, await ask(engine, "c", segment, seed=turn, tokens=8))

    asyncio.run(hold())
    policy = LocalLearner(model, sampling=Sampling(), threads=1)
    update = asyncio.run(policy.update([pack([trajectory(segment, [1.0, -1.0, 1.0])])], lr=1e-3))
    assert update.max_deviation < 1e-3
    assert update.grad_norm > 0


def test_a_model_whose_images_look_ahead_is_refused(tmp_path: Path) -> None:
    model, vision = saved(gemma3, tmp_path)
    engine, segment = LocalEngine(model, threads=1), Segment()
    hear(segment, vision, text_part("look"), image_part(picture()), text_part("?"))
    assert segment.media[0].length == 4
    with pytest.raises(
        EngineError, match=r"Gemma3ForConditionalGeneration computes other logits .* do not attend as text does"
    ):
        asyncio.run(ask(engine, "c", segment))


# a run, from the data file to a checkpoint that can be gone on with


PLACES = Path(__file__).parent.parent / "support" / "vision.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_picture_recipe(tmp_path, model)


def run(recipe: Path, *overrides: str) -> TrainingRun:
    one = assemble(load(recipe, overrides)[0])
    train_silently(one)
    return one


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_training_sees_from_the_row_to_the_checkpoint_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    run(recipe, "data.return_multi_modal_inputs=true")
    run(recipe, "resume=auto", "train.steps=3")
    metrics, records = lines(tmp_path / "run" / "metrics.jsonl"), lines(tmp_path / "run" / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2, 3]
    assert all(one["ratio/max_deviation"] < 1e-3 and one["grad_norm"] > 0 for one in metrics)
    assert len(records) == 3 * 2 * 3
    for one in records:
        assert one["error"] is None
        assert "multi_modal_inputs" not in one["row"]
        first = one["segments"][0]["media"][0]
        assert digest(load_image(one["messages"][0]["content"][0]["image"], where="it")) == first["sha256"]
    longer = [one for one in records if len(one["turns"]) == 2]  # those whose first turn was not cut
    assert longer
    for one in longer:
        second = one["segments"][0]["media"][1]
        assert one["messages"][2]["content"][0]["image"] == f"sha256:{second['sha256']}"
        assert (tmp_path / "run" / "media" / f"{second['sha256']}.png").is_file()


def test_an_option_of_images_is_refused_where_there_are_none(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError, match="return_multi_modal_inputs=false has no effect: no row contains an image"):
        assemble(load(recipe, ("data.return_multi_modal_inputs=false",))[0])
