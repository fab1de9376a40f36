"""Images and videos in a conversation: from parts of messages to placeholder tokens and what the model sees there.

Everything comes from the model's own processor: it is asked what one placeholder becomes for one image, and that is put
into the text that the chat template wrote. So an image is expanded once, when the message that holds it becomes tokens,
and never again. The count of placeholders is asserted twice: in the text, before anything is replaced, and in the tokens.
This module knows neither the model nor torch; `Vision` is made by `Vision.from_pretrained` and held by the renderer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.placeholders import LiteralPlaceholders
from turnwise.chat.processors import load_processor, why_no_videos
from turnwise.data.images import digest, load_image, media_kind, media_value
from turnwise.errors import ConfigError, DataError, TemplateError, TurnwiseError
from turnwise.types import Media, Message, Row

__all__ = ["Part", "Vision", "for_readers", "has_media", "load_image", "ready_media", "refuse_media"]

Kind = Literal["image", "video"]

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json")
"""What a model directory holds for its processor, beside the tokenizer's files."""
_REMEMBERED = 64
"""Images whose tensors are kept for the next conversation that shows the same."""
_LONGEST_ERROR = 1000
"""Characters that are told of an image that cannot be shown."""
_NOT_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""What a processor says about the text, not about the image."""


@dataclass(frozen=True, slots=True)
class Part:
    """An image or a video of a message, as it was given."""

    kind: Kind
    value: Any
    where: str
    """For messages: `image (part 2) of a 'user' message`."""
    said: bool = False
    """The model itself said the placeholder: it stands for nothing and stays what it is."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the processor made of an image: the text in place of one placeholder, its pads, and the tensors."""

    text: str
    pads: int
    inputs: Mapping[str, Any]


def has_media(messages: Iterable[Message]) -> bool:
    """Whether any of the messages holds an image or a video."""
    return any(
        isinstance(part, Mapping) and media_kind(part) is not None
        for message in messages
        if isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


def refuse_media(messages: Iterable[Message], model: str) -> None:
    """For a model that only reads.

    Raises TemplateError if there is an image or a video in the messages.
    """
    if has_media(messages):
        raise TemplateError(
            f"a message holds an image or a video, and {model or 'the model'} takes none: its directory has no image "
            f"processor. Use a model that sees (such as Qwen2.5-VL), or messages of text"
        )


def for_readers(message: Message) -> Message:
    """A tool's message for a model that only reads: its texts, and a word about each image or video that it does not get."""
    if not has_media([message]):
        return message
    parts = [part for part in message["content"] if isinstance(part, Mapping)]
    left_out = [
        f"Error: the answer holds {kind}s, and this model takes none" for kind in map(media_kind, parts) if kind
    ]
    texts = [str(part.get("text", "")) for part in parts if media_kind(part) is None]
    return {**message, "content": "\n".join([*texts, *dict.fromkeys(left_out)])}


def ready_media(rows: Sequence[Row], vision: Vision | None, *, wanted: bool | None) -> list[Row]:
    """The rows, with `multi_modal_inputs` among their fields if that is `wanted` (`data.return_multi_modal_inputs`).

    True runs the processor once for each image now; every conversation on the row takes those tensors. False and None leave
    it to the first conversation that shows the image, and the last of them are remembered.

    Raises ConfigError if something is said where there is nothing to see, DataError if an image is refused.
    """
    if wanted is None:
        return list(rows)
    seeing = [has_media(row.messages) for row in rows]
    if not any(seeing):
        raise ConfigError(
            f"data.return_multi_modal_inputs={str(wanted).lower()} has no effect: no row holds an image or a video. Remove it"
        )
    if not wanted:
        return list(rows)
    ready: list[Row] = []
    for row, sees in zip(rows, seeing, strict=True):
        if not sees:
            ready.append(row)
            continue
        if vision is None:
            refuse_media(row.messages, "the model")
        assert vision is not None
        try:
            inputs = vision.keep(row.messages)
        except TurnwiseError as error:
            raise DataError(f"row {row.id!r}: {error}") from error
        ready.append(replace(row, fields={**row.fields, "multi_modal_inputs": inputs}))
    return ready


class Vision:
    """A model's processor, for one image at a time.

    `processor` is a transformers processor; `pads` maps `image` and `video` to the token that the model replaces by what
    it sees. `files` are those of the processor, to be laid beside a checkpoint.
    """

    def __init__(self, processor: Any, *, pads: Mapping[str, int], files: Sequence[Path] = ()) -> None:
        self.processor = processor
        self.files = tuple(files)
        self._pads = dict(pads)
        kinds: tuple[Kind, ...] = ("image", "video")
        self._placeholders: dict[Kind, str] = {
            kind: token
            for kind in kinds
            if kind in self._pads and isinstance(token := getattr(processor, f"{kind}_token", None), str)
        }
        self._kind_of: dict[str, Kind] = {token: kind for kind, token in self._placeholders.items()}
        self.said = LiteralPlaceholders({str(kind): token for kind, token in self._placeholders.items()})
        """Those that the model has said itself."""
        self._written = re.compile("|".join(map(re.escape, self._kind_of)))
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._kept: dict[str, _Seen] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path, tokenizer: Any) -> Vision | None:
        """The processor of a model directory or hub id, or None if the model takes no images.

        Raises TemplateError if there is one that cannot be loaded.
        """
        from transformers import AutoConfig
        from transformers.utils.hub import cached_file

        where = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else str(path)
        found = [
            cached_file(
                where, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
            )
            for name in _FILES
        ]
        files = [Path(file) for file in found if file is not None]
        if not any(_is_for_images(file) for file in files):
            return None
        try:
            config = AutoConfig.from_pretrained(where)
        except (OSError, ValueError, KeyError) as error:
            raise TemplateError(f"the configuration of {where!r} cannot be read: {error}") from error
        pads = {kind: token for kind in ("image", "video") if (token := _pad_of(config, kind)) is not None}
        if "image" not in pads:
            return None
        return cls(load_processor(where, config, tokenizer), pads=pads, files=files)

    @property
    def pads(self) -> Mapping[str, int]:
        """The tokens that stand for what is seen, by `image` and `video`."""
        return self._pads

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """The images and videos of these messages, in order.

        Raises TemplateError if a part is of another kind, an image has no value, or a text holds a placeholder's own text,
        which would be taken for an image.
        """
        found: list[Part] = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            for number, part in enumerate([content] if isinstance(content, str) else content or (), 1):
                if isinstance(part, str) or part.get("type") == "text" or (part.get("type") is None and "text" in part):
                    found += self._literal(part if isinstance(part, str) else str(part.get("text", "")), role)
                    continue
                kind = media_kind(part)
                if kind is None:
                    raise TemplateError(
                        f"part {number} of a {role!r} message is of the type {part.get('type')!r}; it must be text, image "
                        f"or video"
                    )
                where = f"{kind} (part {number}) of a {role!r} message"
                if (value := media_value(part)) is None:
                    raise TemplateError(
                        f"the {where} holds nothing: {sorted(part)}. Give it as {{'type': {kind!r}, {kind!r}: ...}}"
                    )
                found.append(Part("video" if kind == "video" else "image", value, where))
        return found

    def shown(self, message: Message) -> Message:
        """A message of a tool, as the model can be shown it. What a tool has read somewhere is no reason to end.

        A placeholder in its text is written `<|image_pad |>`, so that it stands for no image. Where an image cannot be shown
        (no image, cut short, too narrow for the processor), the message says so instead.
        """
        message = {**message, "content": self._unmarked(message.get("content"))}
        try:
            for part in self.parts([message]):
                if part.kind not in self._placeholders:
                    raise TemplateError(f"the answer holds a {part.kind}, and the model takes none")
                self._look(part)
        except TurnwiseError as error:
            message["content"] = f"Error: {self._unmarked(str(error))}"[:_LONGEST_ERROR]
        return message

    def _unmarked(self, content: Any) -> Any:
        """A text, or parts, without placeholders in words."""
        if isinstance(content, str):
            return self._written.sub(lambda found: f"{found[0][:-2]} {found[0][-2:]}", content)
        if isinstance(content, Mapping):
            return {name: self._unmarked(value) if name == "text" else value for name, value in content.items()}
        return [self._unmarked(part) for part in content] if isinstance(content, list | tuple) else content

    def expand(self, text: str, parts: Sequence[Part]) -> tuple[str, list[Media]]:
        """Replace each placeholder in a text that the chat template wrote by as many as its image takes.

        The media have no places yet (`start` is -1, `length` the number of pads): `place` finds them among the tokens.

        Raises TemplateError if there are not as many placeholders as images, or DataError if one cannot be read.
        """
        if unknown := {part.kind for part in parts} - set(self._placeholders):
            raise TemplateError(f"a message holds a {min(unknown)}, and the model takes none")
        for kind, token in self._placeholders.items():
            written, given = text.count(token), sum(part.kind == kind for part in parts)
            if written != given:
                raise TemplateError(
                    f"the chat template wrote {written} of the placeholder {token!r} and the messages hold {given} {kind}s; "
                    f"the numbers must be equal. Either the template leaves {kind}s of this role out, or a text holds "
                    f"{token!r} literally: take it out"
                )
        queues = {kind: iter([part for part in parts if part.kind == kind]) for kind in ("image", "video")}
        media: list[Media] = []

        def expanded(match: re.Match[str]) -> str:
            part = next(queues[self._kind_of[match[0]]])
            if part.said:
                return match[0]
            source, seen = self._look(part)
            media.append(Media(kind=part.kind, start=-1, length=seen.pads, source=source, inputs=seen.inputs))
            return seen.text

        return self._written.sub(expanded, text), media

    def place(
        self, token_ids: Sequence[int], found: Sequence[Media], *, words: Mapping[str, Collection[int]] | None = None
    ) -> list[Media]:
        """The same media with their places in `token_ids`, which encode the text that `expand` gave.

        `words` are the placeholders among them that the model said, as `SaidPlaceholders.count` finds them.

        Raises TurnwiseError if the placeholders among the tokens are not those of the images: nothing is ever shifted.
        """
        places = {
            kind: [index for index, token in enumerate(token_ids) if token == pad] for kind, pad in self._pads.items()
        }
        for kind, said in (words or {}).items():
            places[kind] = [index for number, index in enumerate(places[kind]) if number not in said]
        for kind, indices in places.items():
            expected = sum(one.length for one in found if one.kind == kind)
            if len(indices) != expected:
                raise TurnwiseError(
                    f"the tokens hold {len(indices)} {kind} placeholders (token {self._pads[kind]}), and the {kind}s take "
                    f"{expected}; the numbers must be equal. Does the tokenizer belong to the processor?"
                )
        placed: list[Media] = []
        taken = dict.fromkeys(places, 0)
        for one in found:
            own = places[one.kind][taken[one.kind] : taken[one.kind] + one.length]
            taken[one.kind] += one.length
            self._check_grid(one)
            placed.append(replace(one, start=own[0], length=own[-1] - own[0] + 1))
        return placed

    def keep(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Run the images of these messages through the processor now and keep what it makes of them.

        Returns the tensors of all of them by the model's names, in order.
        """
        made: list[Mapping[str, Any]] = []
        for part in self.parts(messages):
            source, seen = self._look(part)
            self._kept[_name(part.kind, source)] = seen
            made.append(seen.inputs)
        names = dict.fromkeys(name for inputs in made for name in inputs)
        return {name: [inputs[name] for inputs in made if name in inputs] for name in names}

    def save_pretrained(self, folder: str | Path) -> None:
        """Lay the processor's files into a model directory, as they were."""
        for file in self.files:
            shutil.copyfile(file, Path(folder) / file.name)

    def _look(self, part: Part) -> tuple[Any, _Seen]:
        """The image (the frames) and what the processor makes of it, once for equal images."""
        source = load_image(part.value, where=part.where) if part.kind == "image" else _load_video(part)
        name = _name(part.kind, source)
        if (seen := self._kept.get(name)) is not None:
            return source, seen
        if (seen := self._seen.get(name)) is None:
            seen = self._process(part, source)
        self._seen[name] = seen
        self._seen.move_to_end(name)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return source, seen

    def _process(self, part: Part, source: Any) -> _Seen:
        processor, token = self.processor, self._placeholders[part.kind]
        if part.kind == "video" and getattr(processor, "video_processor", None) is None:
            raise DataError(f"{part.where}: {why_no_videos()}. Or give the frames as images")
        shown = {"images": [source]} if part.kind == "image" else {"videos": [source]}
        try:
            made = processor(text=[token], add_special_tokens=False, return_tensors="pt", **shown)
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:  # torchcodec raises RuntimeError
            raise DataError(f"{part.where} is refused by the model's processor: {error}") from error
        ids: list[int] = made["input_ids"][0].tolist()
        tokenizer = processor.tokenizer
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
            raise TemplateError(
                f"what {type(processor).__name__} writes for one {part.kind} does not survive its own tokenizer: {text[:80]!r}"
            )
        inputs = {name: value for name, value in made.items() if name not in _NOT_PIXELS and name != "video_metadata"}
        return _Seen(text, sum(token == self._pads[part.kind] for token in ids), inputs)

    def _check_grid(self, one: Media) -> None:
        """The count of pads is that of the grid's cells: Qwen's rule, where there is a grid."""
        grid = one.inputs.get(f"{one.kind}_grid_thw")
        side = getattr(getattr(self.processor, f"{one.kind}_processor", None), "merge_size", None)
        if grid is None or side is None:
            return
        cells = math.prod(grid[0].tolist()) // side**2
        if cells != one.length:
            raise TurnwiseError(
                f"a {one.kind} has {one.length} placeholders and its grid {grid[0].tolist()} makes {cells}; the numbers "
                f"must be equal. The processor and its tokenizer do not belong together"
            )

    def _literal(self, text: str, role: Any) -> list[Part]:
        """The placeholders in a text: the model may say them, nobody else."""
        found = [match[0] for match in self._written.finditer(text)]
        if found and role != "assistant":
            at = text.index(found[0])
            raise TemplateError(
                f"a text of a {role!r} message holds {found[0]!r}, which stands for an image or a video here: "
                f"{text[max(0, at - 20) : at + len(found[0]) + 20]!r}. Take it out of the text; images are parts of their "
                f"own, {{'type': 'image', 'image': ...}}"
            )
        return [Part(self._kind_of[token], None, "a text of the model", said=True) for token in found]


def _load_video(part: Part) -> Any:
    """A list of frames as PIL images; the name of a file as it is, for the processor to read."""
    if isinstance(part.value, str | Path):
        file = Path(os.path.expanduser(str(part.value).removeprefix("file://")))
        if not os.path.isfile(file):
            raise DataError(
                f"{part.where}: there is no video file {file.absolute()}; frames are given as a list of images"
            )
        return str(file)
    if not isinstance(part.value, list | tuple) or not part.value:
        raise DataError(f"{part.where} is a {type(part.value).__name__}; a video is a list of frames, or a path")
    return [load_image(frame, where=f"frame {n} of the {part.where}") for n, frame in enumerate(part.value, 1)]


def _name(kind: str, source: Any) -> str:
    """A name for what is seen, equal for equal content."""
    if isinstance(source, str):
        stat = Path(source).stat()
        return f"{kind}:{source}:{stat.st_size}:{stat.st_mtime_ns}"
    if isinstance(source, list):
        return f"{kind}:{hashlib.sha256(''.join(map(digest, source)).encode()).hexdigest()}"
    return f"{kind}:{digest(source)}"


def _is_for_images(file: Path) -> bool:
    """Whether a processor's file speaks of images: there are processors of sound, and of nothing."""
    if not file.name.endswith("processor_config.json"):
        return False
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TemplateError(f"{file} cannot be read: {error}") from error
    return any(name in said for name in ("image_processor", "image_processor_type", "image_mean"))


def _pad_of(config: Any, kind: str) -> int | None:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return None
