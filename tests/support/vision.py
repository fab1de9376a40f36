"""A tiny model that sees: a Qwen2.5-VL of random weights with its real image processor, saved the way that users have theirs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from support import byte_tokenizer
from turnwise.environments.environment import environment
from turnwise.types import Opening, Reply, Row, Turn

TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML whose messages may have parts, in the manner of Qwen2.5-VL; images in messages of any role."""

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def vision_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, ChatML's special tokens, and those around images."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def vision_model(seed: int = 0, **options: Any) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of 100,000 parameters; patches of 4 pixels, four of which make a token."""
    torch.manual_seed(seed)
    tokenizer = vision_tokenizer()
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **options,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def image_processor(patch: int = 4) -> Qwen2VLImageProcessorPil:
    """Qwen's own, for images of one to sixteen tokens: with patches of 4 pixels, of 8 x 8 to 32 x 32 pixels."""
    token = 4 * patch**2
    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": token, "longest_edge": 16 * token},
    )


def served_vision_model(path: Path, *, seed: int = 0) -> Path:
    """A model directory for vLLM and SGLang, which need heads of 32 numbers, and patches of 14 pixels as Qwen's models have."""
    config = vision_model().config
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads = 64, 2, 1
    text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision.hidden_size = vision.intermediate_size = vision.out_hidden_size = 64
    vision.patch_size, vision.window_size = 14, 56
    torch.manual_seed(seed)
    return _saved(path, Qwen2_5_VLForConditionalGeneration(config), image_processor(14))


def save_vision_model(path: Path, *, seed: int = 0) -> Path:
    """A whole model directory: weights, tokenizer, template, image processor."""
    return _saved(path, vision_model(seed), image_processor())


def save_qwen2_vl(path: Path) -> Path:
    """The same with the model before Qwen2.5-VL, whose vision part has neither windows nor gates."""
    config = vision_model().config
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4}
    marks = {name: getattr(config, name) for name in ("vision_start_token_id", "vision_end_token_id", "image_token_id")}
    text = {name: value for name, value in config.text_config.to_dict().items() if name != "model_type"}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            **marks,
            video_token_id=config.video_token_id,
            tie_word_embeddings=False,
        )
    )
    return _saved(path, model, image_processor())


def save_qwen3_vl(path: Path) -> Path:
    """The same with the model after it, whose vision part adds features to the results of the first layers, too."""
    config = vision_model().config
    marks = {name: getattr(config, name) for name in ("vision_start_token_id", "vision_end_token_id", "image_token_id")}
    text = {name: value for name, value in config.text_config.to_dict().items() if name != "model_type"}
    vision = config.vision_config.to_dict()
    kept = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size")
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**text, "head_dim": 8},
            vision_config={
                **{name: vision[name] for name in kept},
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            **marks,
            video_token_id=config.video_token_id,
            tie_word_embeddings=False,
        )
    )
    return _saved(path, model, image_processor())


def _saved(path: Path, model: Any, processor: Any) -> Path:
    tokenizer = vision_tokenizer()
    # random weights hardly ever say one certain token: with a quarter of the vocabulary, turns do end; not with a blank or
    # a line end, which stand inside turns
    inside = tokenizer.encode(" \n", add_special_tokens=False)
    model.generation_config.eos_token_id = [2, *(one for one in range(188, 259) if one not in inside)]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def picture(width: int = 16, height: int = 16, *, seed: int = 0) -> Image.Image:
    """A picture of random dots: with `width` and `height` multiples of 8, a token for each 8 x 8 of them."""
    generator = torch.Generator().manual_seed(seed)
    dots = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(dots.numpy())


def image_part(image: Any) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image", "image": image}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": text}


@environment
async def shows_another(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Answers the first turn with an image of its own; likes short turns."""
    turn = yield Opening(messages=row.messages)
    shown = [image_part(picture(24, 16, seed=int(row.id))), text_part("And this?")]
    turn = yield Reply(messages=[{"role": "user", "content": shown}], reward=-len(turn.text) / 10)
    yield Reply(reward=-len(turn.text) / 10, done=True)


def save_picture_recipe(folder: Path, model: Path, *, device: str = "cpu") -> Path:
    """A recipe that trains for two steps on four rows with an image each, of the environment `shows_another`."""
    rows = []
    for n in range(4):
        picture(16, 8 * (n + 1), seed=n).save(folder / f"{n}.png")
        rows.append({"prompt": f"<image>What is {n}?", "images": [f"{n}.png"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model": {"path": str(model), "device": device},
        "data": {"train": str(folder / "rows.jsonl")},
        "environment": f"{__file__}:shows_another",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 2, "batch_size": 2, "group_size": 3, "lr": 1e-3},
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path
