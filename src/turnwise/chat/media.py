"""Images and videos of a conversation: from parts of messages to placeholder tokens and tensors for the model.

The model's own processor says which text replaces one placeholder for one image; this text is inserted into the text that
the chat template rendered. An image is expanded once, when its message becomes tokens. The number of placeholders is
checked twice: in the rendered text before the expansion, and in the tokens.

    messages    user: [image 16 x 24, "What is this?"]
    rendered    <|im_start|>user\n<|image_pad|>What is this?...
    expand      <|im_start|>user\n<|image_pad|><|image_pad|>...What is this?...      one placeholder for each patch
    locate      Media(kind="image", start=3, length=6, inputs={"pixel_values": ...})
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.chat.media_cache import MediaCache, ProcessedMedia
from turnwise.chat.media_parts import MediaPart, media_parts
from turnwise.chat.placeholders import MediaKind, Placeholders
from turnwise.chat.processors import load_processor
from turnwise.errors import TemplateError, TurnwiseError
from turnwise.types import Media, Message

__all__ = ["MediaProcessor"]

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
