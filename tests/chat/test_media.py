"""From parts of messages to placeholders and back, and images that tools bring into a conversation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import byte_tokenizer
from support.conversations import a_row, call, hold, scripted, spoken
from support.tiny import save_model
from support.vision import TEMPLATE, image_part, picture, save_vision_model, text_part, vision_tokenizer
from turnwise.chat.media import MediaProcessor, process_row_media
from turnwise.chat.media_parts import has_media, refuse_media
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.environments.tools.toolbox import ToolResponse, Tools
from turnwise.environments.users import ScriptedUser
from turnwise.errors import ConfigError, DataError, TemplateError, TurnwiseError
from turnwise.rollout.context import Limits
from turnwise.types import Message, Row, Segment, Trajectory

TOKENIZER = vision_tokenizer()
PAD = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    found = MediaProcessor.from_pretrained(save_vision_model(tmp_path_factory.mktemp("model")), TOKENIZER)
    assert found is not None
    return found


def asked(*parts: object, role: str = "user") -> list[Message]:
    return [{"role": role, "content": list(parts)}]


def written(messages: list[Message]) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_placeholder_becomes_as_many_as_the_image_has_cells(vision: MediaProcessor) -> None:
    messages = asked(text_part("a"), image_part(picture(16, 24)), text_part("b"), image_part(picture(8, 8)))
    text, found = vision.expand(written(messages), vision.parts(messages))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    first, second = vision.locate(ids, found)
    assert (first.length, second.length) == (6, 1)  # a token for 8 x 8 pixels
    assert ids[first.start : first.start + 6] == [PAD] * 6
    assert ids[second.start] == PAD
    assert ids.count(PAD) == 7
    assert first.inputs["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert first.inputs["pixel_values"].shape == (24, 3 * 2 * 4 * 4)
    assert set(first.inputs) == {"pixel_values", "image_grid_thw"}


def test_tokens_and_pixels_are_those_of_the_whole_processor(vision: MediaProcessor) -> None:
    images = [picture(16, 24), picture(16, 16, seed=1)]
    messages = asked(*(image_part(image) for image in images), text_part("?"))
    text, found = vision.expand(written(messages), vision.parts(messages))
    whole = vision.processor(text=[written(messages)], images=images, return_tensors="pt")
    assert TOKENIZER.encode(text, add_special_tokens=False) == whole["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([one.inputs[name] for one in found]), whole[name])


def test_messages_of_any_role_may_hold_images(vision: MediaProcessor) -> None:
    for role in ("user", "tool", "system"):
        messages = asked(image_part(picture()), text_part("look"), role=role)
        assert [part.kind for part in vision.parts(messages)] == ["image"]
        text, found = vision.expand(written(messages), vision.parts(messages))
        assert text.count("<|image_pad|>") == found[0].length == 4


def test_equal_images_are_processed_once(vision: MediaProcessor) -> None:
    messages = [asked(image_part(picture(seed=5))), asked(image_part(picture(seed=5).copy()))]
    found = [vision.expand(written(one), vision.parts(one))[1][0] for one in messages]
    assert found[0].inputs is found[1].inputs


def test_kept_images_are_not_processed_again(vision: MediaProcessor) -> None:
    messages = asked(image_part(picture(seed=6)), image_part(picture(seed=7)))
    ready = vision.preprocess(messages)
    found = vision.expand(written(messages), vision.parts(messages))[1]
    assert [len(ready[name]) for name in ("pixel_values", "image_grid_thw")] == [2, 2]
    assert all(one.inputs["pixel_values"] is kept for one, kept in zip(found, ready["pixel_values"], strict=True))


def test_a_text_that_says_the_placeholder_is_refused(vision: MediaProcessor) -> None:
    for content in ("What is <|image_pad|>?", [text_part("What is <|image_pad|>?"), image_part(picture())]):
        with pytest.raises(TemplateError, match="Remove it from the text"):
            vision.parts([{"role": "user", "content": content}])


def test_a_template_that_leaves_an_image_out_is_refused_with_both_counts(vision: MediaProcessor) -> None:
    parts = vision.parts(asked(image_part(picture()), image_part(picture())))
    with pytest.raises(
        TemplateError, match=r"wrote the placeholder '<\|image_pad\|>' 1 times, and the messages contain 2"
    ):
        vision.expand("<|image_pad|>", parts)
    with pytest.raises(TemplateError, match=r"wrote .* 3 times, .* contain 2"):
        vision.expand("<|image_pad|>" * 3, parts)


def test_tokens_that_do_not_fit_the_images_are_refused_with_both_counts(vision: MediaProcessor) -> None:
    messages = asked(image_part(picture()))
    text, found = vision.expand(written(messages), vision.parts(messages))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    with pytest.raises(TurnwiseError, match=r"contain 5 image placeholders .* need 4"):
        vision.locate([*ids, PAD], found)
    with pytest.raises(TurnwiseError, match=r"has 5 placeholders, and its grid \[1, 4, 4\] needs 4"):
        vision.locate([*ids, PAD], [replace(found[0], length=5)])


def test_a_part_of_another_kind_or_without_a_value_is_refused(vision: MediaProcessor) -> None:
    with pytest.raises(TemplateError, match="of the type 'audio'; it must be text, image or video"):
        vision.parts(asked({"type": "audio", "audio": b""}))
    with pytest.raises(TemplateError, match="has no value"):
        vision.parts(asked({"type": "image"}))


def test_an_image_that_cannot_be_read_is_reported_by_its_message(vision: MediaProcessor) -> None:
    parts = vision.parts(asked(text_part("a"), image_part("nowhere.png")))
    with pytest.raises(DataError, match=r"image \(part 2\) of a 'user' message: there is no image file"):
        vision.expand("<|image_pad|>", parts)


def test_an_image_that_the_processor_refuses_is_reported(vision: MediaProcessor) -> None:
    parts = vision.parts(asked(image_part(picture(8, 8 * 201))))
    with pytest.raises(DataError, match=r"the model's processor cannot process .*: absolute aspect ratio"):
        vision.expand("<|image_pad|>", parts)


def test_a_video_needs_torchvision_or_is_processed(vision: MediaProcessor) -> None:
    parts = vision.parts(asked({"type": "video", "video": [picture(seed=n) for n in range(4)]}))
    if vision.processor.__dict__.get("video_processor") is None:
        with pytest.raises(DataError, match=r"pip install 'turnwise\[vision\]'"):
            vision.expand("<|video_pad|>", parts)
    else:
        assert vision.expand("<|video_pad|>", parts)[1][0].kind == "video"


def test_a_model_that_only_reads_has_no_vision_and_refuses_images(tmp_path: Path) -> None:
    assert MediaProcessor.from_pretrained(save_model(tmp_path / "reads"), byte_tokenizer()) is None
    refuse_media([{"role": "user", "content": "Hi"}], "qwen")
    assert has_media(asked(image_part(picture())))
    with pytest.raises(TemplateError, match="and qwen does not accept images: its directory has no image processor"):
        refuse_media(asked(image_part(picture())), "qwen")


def test_the_files_of_the_processor_go_with_a_checkpoint(vision: MediaProcessor, tmp_path: Path) -> None:
    vision.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").read_text() == vision.files[0].read_text()


def test_places_count_from_the_segment_when_images_are_appended(vision: MediaProcessor) -> None:
    messages = asked(image_part(picture()))
    text, found = vision.expand(written(messages), vision.parts(messages))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    segment = Segment()
    for _ in range(2):
        segment.append_context(ids, vision.locate(ids, found))
    first, second = segment.media
    assert second.start == first.start + len(ids)
    assert all(segment.token_ids[one.start] == PAD for one in segment.media)


def test_a_placeholder_that_the_model_said_stays_a_word(vision: MediaProcessor) -> None:
    said: list[Message] = [{"role": "assistant", "content": "so <|image_pad|> it is"}]
    messages = [*asked(image_part(picture())), *said, *asked(image_part(picture(8, 8)))]
    text, found = vision.expand(written(messages), vision.parts(messages))
    assert [one.length for one in found] == [4, 1]
    assert text.count("<|image_pad|>") == 6
    assert "so <|image_pad|> it is" in text


def test_images_of_rows_can_be_made_ready_at_the_start(vision: MediaProcessor) -> None:
    rows = [
        Row(
            id="1",
            messages=asked(image_part(picture(seed=20)), image_part(picture(8, 8, seed=21))),
            fields={"answer": 1},
        ),
        Row(id="2", messages=[{"role": "user", "content": "Hi"}]),
    ]
    assert process_row_media(rows, vision, wanted=None) == rows
    assert "multi_modal_inputs" not in process_row_media(rows, vision, wanted=False)[0].fields
    ready, text = process_row_media(rows, vision, wanted=True)
    assert [grid.tolist() for grid in ready["multi_modal_inputs"]["image_grid_thw"]] == [[[1, 4, 4]], [[1, 2, 2]]]
    assert (ready["answer"], text.fields) == (1, {})
    found = vision.expand(written(list(rows[0].messages)), vision.parts(rows[0].messages))[1]
    assert found[0].inputs["pixel_values"] is ready["multi_modal_inputs"]["pixel_values"][0]


def test_making_ready_is_refused_where_it_can_do_nothing(vision: MediaProcessor) -> None:
    text = Row(id="1", messages=[{"role": "user", "content": "Hi"}])
    for wanted in (True, False):
        with pytest.raises(ConfigError, match=f"return_multi_modal_inputs={str(wanted).lower()} has no effect"):
            process_row_media([text], vision, wanted=wanted)
    seen = Row(id="7", messages=asked(image_part(picture(8, 8 * 201))))
    with pytest.raises(
        DataError, match=r"row '7': the model's processor cannot process image .*must be smaller than 200"
    ):
        process_row_media([seen], vision, wanted=True)
    with pytest.raises(TemplateError, match="the model does not accept"):
        process_row_media([seen], None, wanted=True)


# Images that tools bring into a conversation: where they stand, and that a conversation without room takes none of
# one


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = save_vision_model(tmp_path_factory.mktemp("sees"))
    return Renderer.from_pretrained(folder, tool_format="hermes", unchecked=["tools shown"])


async def look(side: int) -> ToolResponse:
    """Look at something.

    Args:
        side: How many pixels it is wide.
    """
    return ToolResponse(text="Here.", image=[picture(side, 16, seed=side)])


def looked(renderer: Renderer, *sides: int, context: int | None = None) -> Trajectory:
    said = [call("look", f'{{"side": {side}}}') for side in sides]
    return hold(
        scripted([*said, "A dog."], renderer=renderer),
        lambda: Tools([look]),
        renderer=renderer,
        row=a_row("What is it?"),
        limits=Limits(turns=8, tokens_per_turn=400, context=context),
    )


def test_an_image_of_a_tool_stands_where_its_answer_does_with_as_many_pads_as_its_cells(renderer: Renderer) -> None:
    trajectory = looked(renderer, 16, 32)
    assert trajectory.error is None, trajectory.error
    assert trajectory.template_mismatch is None
    (segment,) = trajectory.segments
    first, second = segment.media
    pad = renderer.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # patches of 4 pixels, merged by twos: 2 x 2 cells for 16 x 16, 2 x 4 for 32 x 16
    assert [one.length for one in (first, second)] == [4, 8]
    for one in (first, second):
        assert list(segment.token_ids[one.start : one.start + one.length]) == [pad] * one.length
        assert set(segment.turn[one.start : one.start + one.length]) == {-1}
    assert list(segment.token_ids).count(pad) == 12
    assert "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>Here." in spoken(segment, renderer)[2][1]
    assert (
        trajectory.turns[0].outcomes[0].content == "Here. [1 image]"
        or "Here." in trajectory.turns[0].outcomes[0].content
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ToolResponse(image=["no image"]), "Error: image (part 1) of a 'tool' message: there is no image file /"),
        (ToolResponse(image=[b"GIF89a"], text="Here."), "Error: image (part 1) of a 'tool' message"),
        (
            ToolResponse(image=[picture(4, 900)]),
            "Error: the model's processor cannot process image (part 1) of a 'tool' message",
        ),
        (ToolResponse(image=["<|image_pad|>"]), "Error: image (part 1) of a 'tool' message: there is no image file /"),
    ],
    ids=["missing", "cut short", "narrow", "named like a placeholder"],
)
def test_an_image_that_cannot_be_shown_is_an_error_of_the_tool(
    renderer: Renderer, answer: ToolResponse, told: str
) -> None:
    async def show() -> ToolResponse:
        """Show it."""
        return answer

    engine = scripted([call("show"), "A dog."], renderer=renderer)
    trajectory = hold(engine, lambda: Tools([show]), renderer=renderer, row=a_row("What is it?"))
    assert (trajectory.error, trajectory.template_mismatch, trajectory.answer) == (None, None, "A dog.")
    (outcome,) = trajectory.turns[0].outcomes
    assert (outcome.error, outcome.content[: len(told)]) == ("raised", told)
    assert trajectory.messages[-2]["content"] == outcome.content
    assert not trajectory.segments[0].media


@pytest.mark.parametrize("image", [True, False])
def test_a_placeholder_that_a_tool_has_read_somewhere_stands_for_no_image(renderer: Renderer, image: bool) -> None:
    async def read() -> ToolResponse:
        """Read a page."""
        return ToolResponse(text="They write <|image_pad|>.", image=[picture(16, 16)] if image else None)

    engine = scripted([call("read"), "A dog."], renderer=renderer)
    trajectory = hold(engine, lambda: Tools([read]), renderer=renderer, row=a_row("What is it?"))
    assert (trajectory.error, trajectory.template_mismatch, trajectory.answer) == (None, None, "A dog.")
    (segment,) = trajectory.segments
    assert "They write <|image_pad |>." in spoken(segment, renderer)[2][1]
    assert len(segment.media) == image


def test_where_there_is_no_room_for_an_answer_its_image_goes_with_all_of_its_pads(renderer: Renderer) -> None:
    whole = looked(renderer, 16, 32).segments[0]
    before_second = whole.media[1].start
    for context in (before_second - 2, before_second + 3, before_second + whole.media[1].length):
        trajectory = looked(renderer, 16, 32, context=context)
        assert (trajectory.error, trajectory.stop) == (None, "context")
        (segment,) = trajectory.segments
        assert len(segment.media) == 1
        pads = list(segment.token_ids).count(renderer.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
        assert pads == segment.media[0].length == 4


def test_a_new_segment_begins_with_the_images_of_the_history(tmp_path: Path) -> None:
    thinks = TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    tokenizer = vision_tokenizer(thinks)
    vision = MediaProcessor.from_pretrained(save_vision_model(tmp_path), tokenizer)
    renderer = Renderer(tokenizer, tool_format="hermes", unchecked=["tools shown"], vision=vision)
    said = ["<think>Let me see.</think>" + call("look", '{"side": 16}'), "A dog."]
    trajectory = hold(
        scripted(said, renderer=renderer), lambda: Tools([look]), renderer=renderer, thinking="branch", row=a_row("?")
    )
    assert trajectory.error is None, trajectory.error
    first, second = trajectory.segments
    assert (len(first.media), len(second.media)) == (0, 1)
    assert "Let me see." not in renderer.decode(second.token_ids)
    assert trajectory.template_mismatch is None


@pytest.mark.parametrize("thinking", ["keep", "branch"])
@pytest.mark.parametrize("said", ["<think>An <|image_pad|>?</think>It.", "<think>What?</think>An <|image_pad|>."])
def test_a_placeholder_that_the_model_says_is_a_word_and_breaks_nothing(
    tmp_path: Path, thinking: Thinking, said: str
) -> None:
    forgets = TEMPLATE.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    tokenizer = vision_tokenizer(forgets)
    vision = MediaProcessor.from_pretrained(save_vision_model(tmp_path), tokenizer)
    renderer = Renderer(tokenizer, tool_format="hermes", unchecked=["tools shown"], vision=vision)
    trajectory = hold(
        scripted([said, call("look", '{"side": 16}'), "A dog."], renderer=renderer),
        lambda: Tools([look], then=ScriptedUser(["Look.", "So?"])),
        renderer=renderer,
        thinking=thinking,
        row=a_row("?"),
        limits=Limits(turns=3, tokens_per_turn=400),
    )
    assert (trajectory.error, trajectory.template_mismatch) == (None, None)
    assert len(trajectory.segments) == (2 if thinking == "branch" else 1)
    segment = trajectory.segments[-1]
    (image,) = segment.media
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert list(segment.token_ids[image.start : image.start + image.length]) == [pad] * 4
    outside = [*segment.token_ids[: image.start], *segment.token_ids[image.start + image.length :]]
    assert outside.count(pad) == (thinking == "keep" or "An <|image_pad|>." in said)


def test_a_model_that_only_reads_is_told_so_and_goes_on() -> None:
    trajectory = hold(scripted([call("look", '{"side": 16}'), "Ah."]), lambda: Tools([look]), row=a_row("What is it?"))
    assert (trajectory.error, trajectory.template_mismatch, trajectory.answer) == (None, None, "Ah.")
    told = "Here.\nError: the answer contains images, and this model does not accept images"
    assert trajectory.messages[2]["content"] == told
    (outcome,) = trajectory.turns[0].outcomes
    assert (outcome.content, outcome.error) == (told, "raised")
