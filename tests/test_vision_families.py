"""Other families that see: expanded by their own processors, exact over the slots and in training, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from engines.test_local_vision import ask
from support.vision import MARKS, TEMPLATE, image_part, image_processor, picture, text_part, vision_tokenizer
from training.test_vision import trajectory
from turnwise.chat.media import MediaProcessor
from turnwise.engines.local import LocalEngine
from turnwise.errors import EngineError
from turnwise.models.loading import ModelOptions, load_model
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.types import Media, Sampling, Segment

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


def qwen3_vl() -> tuple[Any, ...]:
    """Positions on three axes, and eyes that speak into several layers."""
    made = vision_tokenizer()
    start, end, image, video = made.convert_tokens_to_ids(list(MARKS))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = hf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
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
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return hf.Qwen3VLForConditionalGeneration(config), made, image_processor()


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
    return load_model(ModelOptions(path=path, dtype="float32", device="cpu")), found


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
    assert update.max_deviation < 1e-3
    assert update.grad_norm > 0
    eyes = [parameter for name, parameter in model.named_parameters() if "vision" in name or "visual" in name]
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in eyes)


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
