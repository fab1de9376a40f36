"""Images and videos of a conversation: from parts of messages to placeholder tokens and tensors for the model.

The model's own processor says which text replaces one placeholder for one image; this text is inserted into the text that the
chat template rendered. An image is expanded once, when its message becomes tokens, and the processor runs once for equal
content. Invariant: the number of placeholders is checked twice, in the rendered text before the expansion, and in the tokens.

    messages    user: [image 16 x 24, "What is this?"]
    rendered    <|im_start|>user\\n<|image_pad|>What is this?...
    expand      <|im_start|>user\\n<|image_pad|><|image_pad|>...What is this?...      one placeholder for each patch
    locate      Media(kind="image", start=3, length=6, inputs={"pixel_values": ...})

transformers needs torchvision, and options in the model's directory, for a processor's video part. Images need neither. So if
one of them is missing, the processor is created without its video part. Knows the processor of transformers. Does not know
engines, turns or the loss.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.chat.media_parts import MediaKind, MediaPart, Placeholders, has_media, media_parts, refuse_media
from turnwise.data.images import digest, load_image
from turnwise.errors import ConfigError, DataError, TemplateError, TurnwiseError
from turnwise.types import Media, Message, Row

# Processor of a vision model, with torchvision or without it


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


# Cache: the processor runs once for equal content

_CACHE_SIZE = 64
"""Images whose tensors are kept for the next conversation with the same image."""
_NOT_MEDIA = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "video_metadata")
"""Outputs of a processor that are not inputs of the vision part of the model."""


@dataclass(frozen=True, slots=True)
class ProcessedMedia:
    """An image or a video after the processor."""

    source: Any
    """The PIL image, the frames, or the path of a video file."""
    text: str
    """The text that replaces one placeholder."""
    num_placeholders: int
    """Placeholder tokens in that text."""
    inputs: Mapping[str, Any]
    """Tensors for the model's forward, by its names, such as `pixel_values`."""


class MediaCache:
    """`processor` is a processor of transformers, `tokens` and `token_ids` the placeholder of each kind of media."""

    def __init__(self, processor: Any, tokens: Mapping[MediaKind, str], token_ids: Mapping[str, int]) -> None:
        self.processor = processor
        self._tokens, self._token_ids = tokens, token_ids
        self._lock = threading.Lock()
        """Held while the two below are read or changed: agents' images are also checked in threads."""
        self._recent: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._pinned: dict[str, ProcessedMedia] = {}

    def get(self, part: MediaPart, *, pin: bool = False) -> ProcessedMedia:
        """Load and process the image or video, or take an equal one from the cache; `pin` keeps it for the rest of the run.

        Raises DataError if it cannot be loaded or processed.
        """
        source = load_image(part.value, where=part.where) if part.kind == "image" else _load_video(part)
        key = _content_key(part.kind, source)
        with self._lock:
            processed = self._pinned.get(key) or self._recent.get(key)
        processed = processed or self._process(part, source)
        with self._lock:
            if key not in self._pinned:
                self._recent[key] = processed
                self._recent.move_to_end(key)
                while len(self._recent) > _CACHE_SIZE:
                    self._recent.popitem(last=False)
            if pin:
                self._pinned[key] = processed
        return processed

    def _process(self, part: MediaPart, source: Any) -> ProcessedMedia:
        processor = self.processor
        if part.kind == "video" and getattr(processor, "video_processor", None) is None:
            raise DataError(f"{part.where}: {why_no_videos()}. Or give the frames as images")
        media = {"images": [source]} if part.kind == "image" else {"videos": [source]}
        try:
            outputs = processor(text=[self._tokens[part.kind]], add_special_tokens=False, return_tensors="pt", **media)
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:  # torchcodec raises RuntimeError
            raise DataError(f"the model's processor cannot process {part.where}: {error}") from error
        ids: list[int] = outputs["input_ids"][0].tolist()
        tokenizer = processor.tokenizer
        # the text goes into the prompt, which is encoded later: its ids there must be the same
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
            raise TemplateError(
                f"{type(processor).__name__} writes the text {text[:80]!r} for a {part.kind}, and its own tokenizer encodes this "
                f"text as other tokens. Use the tokenizer that belongs to the processor"
            )
        inputs = {name: value for name, value in outputs.items() if name not in _NOT_MEDIA}
        return ProcessedMedia(source, text, sum(token == self._token_ids[part.kind] for token in ids), inputs)


def _load_video(part: MediaPart) -> Any:
    """A list of frames as PIL images; the path of a file as it is, for the processor to read."""
    if isinstance(part.value, str | Path):
        file = Path(os.path.expanduser(str(part.value).removeprefix("file://")))
        if not os.path.isfile(file):
            raise DataError(
                f"{part.where}: there is no video file {file.absolute()}. Correct the path, or give a list of frames"
            )
        return str(file)
    if not isinstance(part.value, list | tuple) or not part.value:
        raise DataError(f"{part.where} is a {type(part.value).__name__}; a video must be a list of frames or a path")
    return [load_image(frame, where=f"frame {n} of the {part.where}") for n, frame in enumerate(part.value, 1)]


def _content_key(kind: str, source: Any) -> str:
    """Equal for equal content; for a video file: for the same file, unchanged."""
    if isinstance(source, str):
        stat = Path(source).stat()
        return f"{kind}:{source}:{stat.st_size}:{stat.st_mtime_ns}"
    if isinstance(source, list):
        return f"{kind}:{hashlib.sha256(''.join(map(digest, source)).encode()).hexdigest()}"
    return f"{kind}:{digest(source)}"


# Placeholders: expansion in texts, places in tokens

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""Files of a model directory that belong to the processor, besides those of the tokenizer."""
_KINDS: tuple[MediaKind, ...] = ("image", "video")
_MAX_ERROR = 1000
"""Characters of an error in a tool's message."""


class MediaProcessor:
    """The processor of a vision model.

    `processor` is a processor of transformers. `token_ids` maps `image` and `video` to the placeholder token whose embedding
    the model replaces. `files` are the processor's files, which are copied into checkpoints.
    """

    def __init__(self, processor: Any, *, token_ids: Mapping[str, int], files: Sequence[Path] = ()) -> None:
        self.processor = processor
        self.files = tuple(files)
        self.token_ids = dict(token_ids)
        self.placeholders = Placeholders(
            {
                kind: token
                for kind in _KINDS
                if kind in token_ids and isinstance(token := getattr(processor, f"{kind}_token", None), str)
            }
        )
        self._cache = MediaCache(processor, self.placeholders.tokens, self.token_ids)

    @classmethod
    def from_pretrained(cls, path: str | Path, tokenizer: Any) -> MediaProcessor | None:
        """The processor of a model directory or hub id, or None if the model does not accept images.

        Raises TemplateError if there is a processor that cannot be loaded.
        """
        from transformers import AutoConfig
        from transformers.utils.hub import cached_file

        where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else str(path)
        paths = [
            cached_file(
                where, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            )
            for name in _FILES
        ]
        files = [Path(file) for file in paths if file is not None]
        if not any(_is_image_processor(file) for file in files):
            return None
        try:
            config = AutoConfig.from_pretrained(where)
        except (OSError, ValueError, KeyError) as error:
            raise TemplateError(f"the configuration of {where!r} cannot be read: {error}") from error
        token_ids = {kind: token for kind in _KINDS if (token := _placeholder_token_id(config, kind)) is not None}
        if "image" not in token_ids:
            return None
        return cls(load_processor(where, config, tokenizer), token_ids=token_ids, files=files)

    def parts(self, messages: Sequence[Message]) -> list[MediaPart]:
        """The images and videos of these messages, in order (`media_parts`, with its errors)."""
        return media_parts(messages, self.placeholders)

    def check(self, messages: Sequence[Message]) -> None:
        """Raise TemplateError or DataError if an image or a video of these messages cannot be in a prompt."""
        for part in self.parts(messages):
            if part.kind not in self.placeholders.tokens:
                raise TemplateError(f"a message contains {part.kind}s, and the model does not accept {part.kind}s")
            if not part.literal:
                self._cache.get(part)

    def clean_tool_message(self, message: Message) -> Message:
        """A tool's message that can be rendered. The output of a tool must never end a conversation.

        A placeholder in a text is written `<|image_pad |>`, so that it stands for no image. If an image cannot be processed
        (no image, truncated, too narrow), the error becomes the content of the message.
        """
        message = {**message, "content": self.placeholders.escape(message.get("content"))}
        try:
            for part in self.parts([message]):
                if part.kind not in self.placeholders.tokens:
                    raise TemplateError(f"the answer contains {part.kind}s, and the model does not accept {part.kind}s")
                self._cache.get(part)
        except TurnwiseError as error:
            message["content"] = f"Error: {self.placeholders.escape(str(error))}"[:_MAX_ERROR]
        return message

    def expand(self, text: str, parts: Sequence[MediaPart]) -> tuple[str, list[Media]]:
        """Replace each placeholder in a rendered text by the processor's text for its image.

        The media have no position yet (`start` is -1, `length` the number of placeholders): `locate` finds it.

        Raises TemplateError if the number of placeholders in the text differs from the number of images, DataError if an image
        cannot be read.
        """
        counts = Counter(part.kind for part in parts)
        if unknown := counts.keys() - self.placeholders.tokens.keys():
            raise TemplateError(f"a message contains {min(unknown)}s, and the model does not accept {min(unknown)}s")
        for kind, token in self.placeholders.tokens.items():
            if (rendered := text.count(token)) != counts[kind]:
                raise TemplateError(
                    f"the chat template wrote the placeholder {token!r} {rendered} times, and the messages contain "
                    f"{counts[kind]} {kind}s; the numbers must be equal. Either the template leaves out {kind}s of this role, "
                    f"or a text contains {token!r} literally: remove it from the text"
                )
        queues = {kind: iter([part for part in parts if part.kind == kind]) for kind in _KINDS}
        media: list[Media] = []

        def expansion(kind: MediaKind) -> str:
            part = next(queues[kind])
            if part.literal:
                return self.placeholders.tokens[kind]
            image = self._cache.get(part)
            media.append(
                Media(kind=kind, start=-1, length=image.num_placeholders, source=image.source, inputs=image.inputs)
            )
            return image.text

        return self.placeholders.replace(text, expansion), media

    def locate(
        self, token_ids: Sequence[int], media: Sequence[Media], *, literal: Mapping[str, Collection[int]] | None = None
    ) -> list[Media]:
        """The same media with their position in `token_ids`, which encode the text that `expand` returned.

        `literal` says which placeholders are literal (`Placeholders.literal_indices`).

        Raises TurnwiseError if the tokens do not contain exactly the placeholders of the media: a position is never guessed.
        """
        indices: dict[str, list[int]] = {}
        for kind, placeholder in self.token_ids.items():
            skipped = (literal or {}).get(kind, ())
            of_kind = [index for index, token in enumerate(token_ids) if token == placeholder]
            indices[kind] = [index for number, index in enumerate(of_kind) if number not in skipped]
            expected = sum(item.length for item in media if item.kind == kind)
            if len(indices[kind]) != expected:
                raise TurnwiseError(
                    f"the tokens contain {len(indices[kind])} {kind} placeholders (token {placeholder}), and the {kind}s need "
                    f"{expected}; the numbers must be equal. Use the tokenizer that belongs to the processor"
                )
        located: list[Media] = []
        used = dict.fromkeys(indices, 0)
        for item in media:
            own = indices[item.kind][used[item.kind] : used[item.kind] + item.length]
            used[item.kind] += item.length
            self._check_grid(item)
            located.append(replace(item, start=own[0], length=own[-1] - own[0] + 1))
        return located

    def process(self, kind: MediaKind, value: Any) -> ProcessedMedia:
        """One image, or one video as a list of frames, after the processor. Equal images share their tensors.

        Raises DataError if it cannot be loaded or processed.
        """
        return self._cache.get(MediaPart(kind, value, f"the {kind}"))

    def preprocess(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Run the images of these messages through the processor now, and keep the results for the rest of the run.

        Returns a list of tensors, one for each image in order, by the model's names.
        """
        processed = [self._cache.get(part, pin=True).inputs for part in self.parts(messages)]
        names = dict.fromkeys(name for inputs in processed for name in inputs)
        return {name: [inputs[name] for inputs in processed if name in inputs] for name in names}

    def save_pretrained(self, folder: str | Path) -> None:
        """Copy the processor's files, unchanged, into a model directory."""
        for file in self.files:
            shutil.copyfile(file, Path(folder) / file.name)

    def _check_grid(self, item: Media) -> None:
        """The number of placeholders is that of the merged patches (Qwen's `image_grid_thw`), if there is a grid."""
        grid = item.inputs.get(f"{item.kind}_grid_thw")
        merge_size = getattr(getattr(self.processor, f"{item.kind}_processor", None), "merge_size", None)
        if grid is None or merge_size is None:
            return
        cells = math.prod(grid[0].tolist()) // merge_size**2
        if cells != item.length:
            raise TurnwiseError(
                f"the {item.kind} has {item.length} placeholders, and its grid {grid[0].tolist()} needs {cells}; the numbers "
                f"must be equal. Use the tokenizer that belongs to the processor"
            )


def _is_image_processor(file: Path) -> bool:
    """Whether a processor's file configures images: some processors are for audio, some for text only."""
    if not file.name.endswith("processor_config.json"):
        return False
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TemplateError(f"{file} cannot be read: {error}") from error
    return any(name in options for name in ("image_processor", "image_processor_type", "image_mean"))


def _placeholder_token_id(config: Any, kind: str) -> int | None:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return None


# Images of the data set, processed before training or when first needed


def process_row_media(rows: Sequence[Row], processor: MediaProcessor | None, *, wanted: bool | None) -> list[Row]:
    """The rows, with `multi_modal_inputs` among their fields if `wanted` (`data.return_multi_modal_inputs`) is true.

    True: run the processor now, once for each image; all conversations of the row use these tensors. False and None: the
    first conversation that needs an image runs the processor, and a cache keeps the most recent images.

    Raises ConfigError if `wanted` is given and no row contains an image or a video, DataError if the processor refuses one.
    """
    if wanted is None:
        return list(rows)
    with_media = [has_media(row.messages) for row in rows]
    if not any(with_media):
        raise ConfigError(
            f"data.return_multi_modal_inputs={str(wanted).lower()} has no effect: no row contains an image or a video. Remove it"
        )
    if not wanted:
        return list(rows)
    return [
        _process_row(row, processor) if has_images else row for row, has_images in zip(rows, with_media, strict=True)
    ]


def _process_row(row: Row, processor: MediaProcessor | None) -> Row:
    if processor is None:
        refuse_media(row.messages, "the model")
    assert processor is not None
    try:
        inputs = processor.preprocess(row.messages)
    except TurnwiseError as error:
        raise DataError(f"row {row.id!r}: {error}") from error
    return replace(row, fields={**row.fields, "multi_modal_inputs": inputs})
