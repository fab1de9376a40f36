"""The processor of a model that sees, loaded from its directory, with torchvision or without it.

transformers makes the part for videos with torchvision only, and from options in the model's directory. Images do not need it,
so a processor is made without that part where torchvision or the options are missing. This module knows nothing of conversations.
"""

from __future__ import annotations

from typing import Any

from turnwise.errors import TemplateError

__all__ = ["load_processor", "why_no_videos"]


def load_processor(path: str, config: Any, tokenizer: Any) -> Any:
    """The processor in the directory, or of the hub id, `path`, whose model has the configuration `config`.

    Raises TemplateError if it cannot be loaded, or needs torchvision and there is none that works.
    """
    from transformers import PROCESSOR_MAPPING, AutoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    try:
        family: Any = PROCESSOR_MAPPING.get(type(config), None)
        takes_videos = family is not None and "video_processor" in family.get_attributes()
        if not takes_videos or (is_torchvision_available() and _has_video_options(path)):
            return AutoProcessor.from_pretrained(path)
        return _without_videos(family, path, tokenizer)
    except (ImportError, RuntimeError) as error:
        fix = "pip install 'turnwise[vision]'"
        if is_torchvision_available() and "torchvision" in str(error):
            fix = (
                "The installed torchvision was made for another torch: install a pair that belongs together (pip install torch "
                "torchvision, both from one index), or remove torchvision, which images do not need and videos do"
            )
        raise TemplateError(f"the processor of {path!r} cannot be loaded: {error}. {fix}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TemplateError(f"the processor of {path!r} cannot be loaded: {error}") from error


def why_no_videos() -> str:
    """Why a processor was made without its part for videos, and the fix."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():
        return "the model's directory has no options for videos (video_preprocessor_config.json)"
    return "transformers reads videos with torchvision, which is not installed: pip install 'turnwise[vision]'"


def _has_video_options(path: str) -> bool:
    """Whether the directory, or the hub, holds options that transformers makes the part for videos from."""
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        BaseVideoProcessor.get_video_processor_dict(path)
    except OSError:
        return False
    return True


def _without_videos(family: Any, path: str, tokenizer: Any) -> Any:
    """A processor of this class with everything that processor_config.json says, and no part for videos.

    Raises ImportError if the class cannot be made without one.
    """
    from transformers import AutoImageProcessor

    attributes = list(family.get_attributes())
    if attributes != ["image_processor", "tokenizer", "video_processor"]:
        raise ImportError(
            f"{family.__name__} is made of {', '.join(attributes)}, and the part for videos needs torchvision"
        )
    others = attributes[:2]
    seeing = type(family.__name__, (family,), {"get_attributes": classmethod(lambda cls: others)})
    said, _ = family.get_processor_dict(path)
    parts = [AutoImageProcessor.from_pretrained(path), tokenizer]
    return seeing.from_args_and_dict(parts, {**said, "video_processor": None})
