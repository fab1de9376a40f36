"""Loads the processor of a vision model, with torchvision or without it.

transformers needs torchvision, and options in the model's directory, for a processor's video part. Images need neither. So if
one of them is missing, the processor is created without its video part. Does not know conversations.
"""

from __future__ import annotations

from typing import Any

from turnwise.errors import TemplateError

__all__ = ["load_processor", "why_no_videos"]


def load_processor(path: str, config: Any, tokenizer: Any) -> Any:
    """The processor of the model directory or hub id `path`, whose model has the configuration `config`.

    Raises TemplateError if it cannot be loaded, or needs torchvision and torchvision is missing or broken.
    """
    from transformers import PROCESSOR_MAPPING, AutoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    try:
        family: Any = PROCESSOR_MAPPING.get(type(config), None)
        takes_videos = family is not None and "video_processor" in family.get_attributes()
        if not takes_videos or (is_torchvision_available() and _has_video_options(path)):
            return AutoProcessor.from_pretrained(path)
        return _without_video_part(family, path, tokenizer)
    except (ImportError, RuntimeError) as error:
        fix = "pip install 'turnwise[vision]'"
        if is_torchvision_available() and "torchvision" in str(error):
            fix = (
                "The installed torchvision was built for another torch: install versions that belong together (pip install "
                "torch torchvision, both from one index), or remove torchvision, which only videos need"
            )
        raise TemplateError(f"the processor of {path!r} cannot be loaded: {error}. {fix}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TemplateError(f"the processor of {path!r} cannot be loaded: {error}") from error


def why_no_videos() -> str:
    """Why a processor has no video part, and the fix."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return "the model's directory has no options for videos (video_preprocessor_config.json)"
    return "transformers reads videos with torchvision, which is not installed: pip install 'turnwise[vision]'"


def _has_video_options(path: str) -> bool:
    """Whether the model has the options of a video part."""
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        BaseVideoProcessor.get_video_processor_dict(path)
    except OSError:
        return False
    return True


def _without_video_part(family: Any, path: str, tokenizer: Any) -> Any:
    """A processor of this class, with the options of processor_config.json, but without a video part.

    Raises ImportError if the class consists of other parts than an image processor, a tokenizer and a video part.
    """
    from transformers import AutoImageProcessor

    attributes = list(family.get_attributes())
    if attributes != ["image_processor", "tokenizer", "video_processor"]:
        raise ImportError(
            f"{family.__name__} consists of {', '.join(attributes)}, and the video part needs torchvision"
        )
    # a subclass that declares only the first two attributes, so that transformers does not look for the third
    image_only = type(family.__name__, (family,), {"get_attributes": classmethod(lambda cls: attributes[:2])})
    options, _ = family.get_processor_dict(path)
    parts = [AutoImageProcessor.from_pretrained(path), tokenizer]
    return image_only.from_args_and_dict(parts, {**options, "video_processor": None})
