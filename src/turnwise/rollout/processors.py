"""The processor of a model that sees, loaded from its directory, with torchvision or without it.

transformers makes the part for videos with torchvision only. Images do not need it, so a processor is made without that part
where torchvision is missing. This module knows nothing of conversations.
"""

from __future__ import annotations

from typing import Any

from turnwise.errors import TemplateError

__all__ = ["load_processor"]


def load_processor(path: str, config: Any, tokenizer: Any) -> Any:
    """The processor in the directory, or of the hub id, `path`, whose model has the configuration `config`.

    Raises TemplateError if it cannot be loaded, or needs torchvision and there is none that works.
    """
    from transformers import PROCESSOR_MAPPING, AutoProcessor
    from transformers.utils.import_utils import is_torchvision_available

    try:
        if is_torchvision_available():
            return AutoProcessor.from_pretrained(path)
        family: Any = PROCESSOR_MAPPING.get(type(config), None)
        if family is None or "video_processor" not in family.get_attributes():
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
