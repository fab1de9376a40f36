"""Images that tools bring into a conversation: where they stand, and that a conversation without room takes none of one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL")

from support.conversations import a_row, call, hold, scripted, spoken
from support.vision import TEMPLATE, picture, save_vision_model, vision_tokenizer
from turnwise.chat.media import MediaProcessor
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.environments.tools.toolbox import ToolResponse, Tools
from turnwise.environments.users import ScriptedUser
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory


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
