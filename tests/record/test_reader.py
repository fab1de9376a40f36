"""What is read of a run is what was written, whatever it holds and however large it is."""

from __future__ import annotations

import io
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import record as record_benchmark
from support import viewed_run
from support.conversations import Says, a_row, call, hold
from support.vision import picture
from turnwise import record
from turnwise.data.images import digest
from turnwise.environments.environment import SingleTurn, environment, user_message
from turnwise.environments.tools.toolbox import ToolResponse, Tools
from turnwise.errors import RunError
from turnwise.record.reader import RecordedTrajectories, read, token_texts, turns_of_messages
from turnwise.record.trajectory_json import StoredImage, decode_trajectory, trajectory_record
from turnwise.record.writer import write_trajectories
from turnwise.types import (
    Failure,
    Media,
    MismatchKind,
    Opening,
    Reply,
    Resume,
    Row,
    Segment,
    TemplateMismatch,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
)
from turnwise.view.runs import ViewedRun

# A record that can be read back: typed trajectories, the same bytes when they are written again, and every defect
# named.


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def look() -> ToolResponse:
    """Look."""
    return ToolResponse(text="Here.", image=[picture(16, 16)])


@environment
async def rewrites(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Replaces the history after the first answer, and keeps the answer."""
    turn = yield Opening(messages=row.messages)
    yield Reply(
        rewrite=[{"role": "user", "content": "Short."}, turn.message],
        messages=user_message("And?").messages,
        reward=0.5,
    )
    yield Reply(done=True, reward=1.0, train_on=[0])


@environment
async def cuts(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Cuts the first answer and lets the model continue it."""
    yield Opening(messages=row.messages)
    yield Reply(resume=Resume(keep=4, add=" Wait."), info={"cut": True})
    yield Reply(done=True)


def with_tools() -> Trajectory:
    one = hold(
        Says(f"I ask. {call('add', json.dumps({'a': 1, 'b': 2}))}{call('sub')}<tool_call>?</tool_call>", "3"),
        lambda: Tools([add]),
        row=a_row("1+2?", id="r1", answer=3),
    )
    one.reward, one.rewards, one.metrics = 1.5, {"turns": 0.0, "judge": 1.5}, {"length": 2.0}
    one.advantages = [0.25, [0.5, -0.25]]  # type: ignore[list-item]
    one.turns[0].weight = 0.0
    one.turns[1].rewards["judge"] = 1.5
    return one


def half_a_surrogate_pair() -> Trajectory:
    one = hold([call("add", '{"a": "\\ud83d", "b": 2}'), "3"], lambda: Tools([add]))  # type: ignore[arg-type]
    one.turns[1].info.update({"half": "\ud83d", "\udc00": "both: \ud83d" + "\ude00"})
    return one


def with_mismatch(kind: MismatchKind | None) -> Trajectory:
    one = hold(Says("a"))
    one.template_mismatch = TemplateMismatch(kind, "tokens 3 to 4")
    return one


CONVERSATIONS = {
    "one turn": lambda: hold(Says("grüße 🙂\u2028\x00")),
    "tools": with_tools,
    "an image of a tool": lambda: hold(Says(call("look"), "A dog."), lambda: Tools([look])),
    "a cut answer": lambda: hold(Says("It is 5.", " It is 6."), cuts),
    "a replaced history": lambda: hold(Says("first", "second"), rewrites),
    "a failed engine": lambda: hold(Says(call("add", '{"a": 1, "b": 2}'), RuntimeError("dead")), lambda: Tools([add])),
    "a failed opening": lambda: hold(Says("a"), row=a_row("Hi" * 4000)),
    "a template mismatch": lambda: with_mismatch(MismatchKind.COMPLETION),
    "a template mismatch of unknown kind": lambda: with_mismatch(None),
    "half a surrogate pair": half_a_surrogate_pair,
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_was_read_is_written_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    path, again = tmp_path / "trajectories.jsonl", tmp_path / "again.jsonl"
    write_trajectories(path, [CONVERSATIONS[name]()], step=3)
    (one,) = read(tmp_path)
    write_trajectories(again, [one])
    assert again.read_bytes() == path.read_bytes()


def test_the_log_probabilities_of_the_trainer_are_read_back(tmp_path: Path) -> None:
    one = hold(Says("It is 5.", " It is 6."), cuts)
    values = [math.nan if turn == 0 else 0.0 if turn < 0 else -1.2345678 for turn in one.segments[0].turn]
    one.segments[0].trainer_logprobs = array("f", values)
    path, again = tmp_path / "trajectories.jsonl", tmp_path / "again.jsonl"
    write_trajectories(path, [one], step=3)
    (found,) = read(tmp_path)
    assert list(found.segments[0].trainer_logprobs) == pytest.approx(values, abs=1e-7, nan_ok=True)
    write_trajectories(again, [found])
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_trajectory_that_was_read_is_the_one_that_was_written(name: str, tmp_path: Path) -> None:
    live = CONVERSATIONS[name]()
    write_trajectories(tmp_path / "trajectories.jsonl", [live], step=3)
    (one,) = read(tmp_path / "trajectories.jsonl")
    if "surrogate" in name:
        live.turns[1].info["\udc00"] = "both: 😀"  # two halves that meet are one character
    same = {field.name for field in fields(Trajectory)} - {
        "row", "messages", "tools", "turns", "segments", "seed", "environment", "started", "seconds",
    }  # fmt: skip
    assert {name: getattr(one, name) for name in same} == {name: getattr(live, name) for name in same}
    assert list(one.tools) == list(live.tools)
    assert one.started == pytest.approx(live.started, abs=1e-3)
    assert one.error is None or one.error.traceback == live.error.traceback  # type: ignore[union-attr]
    assert (one.row.id, one.row.fields) == (live.row.id, live.row.fields)
    if "image" not in name:
        assert one.messages == live.messages
    unlike = {"completion", "prompt_tokens", "outcomes", "tools", "started", "seconds_engine", "seconds_environment"}
    for turn, was in zip(one.turns, live.turns, strict=True):
        for field in fields(Turn):
            if field.name not in unlike:
                assert getattr(turn, field.name) == getattr(was, field.name), field.name
        assert (turn.started, turn.ended) == pytest.approx((was.started, was.ended), abs=2e-3)
        for outcome, before in zip(turn.outcomes, was.outcomes, strict=True):
            assert (outcome.id, outcome.name, outcome.content) == (before.id, before.name, before.content)
            assert (outcome.error, outcome.reward, outcome.attempts) == (before.error, before.reward, before.attempts)
        assert list(turn.tools) == list(was.tools)
    for segment, was in zip(one.segments, live.segments, strict=True):
        assert segment == was or [media.start for media in segment.media] == [media.start for media in was.media]
        assert (segment.token_ids, segment.turn, segment.version) == (was.token_ids, was.turn, was.version)
    assert one.sampled_tokens == sum(turn >= 0 for segment in live.segments for turn in segment.turn)


def test_every_turn_names_its_message_and_the_history_that_the_model_answered() -> None:
    one = CONVERSATIONS["a replaced history"]()
    histories = [*one.previous_histories, one.messages]
    assert [(turn.history, turn.message_index) for turn in one.turns] == [(0, 1), (1, 3)]
    for turn in one.turns:
        assert turn.message_index is not None
        assert histories[turn.history][turn.message_index] == turn.message
    assert histories[0][:1] == [{"role": "user", "content": "Hi"}]
    # the first answer stands in the new history too
    assert [[turn.index for turn in turns] for turns in turns_of_messages(one)] == [[], [0], [], [1]]
    cut = CONVERSATIONS["a cut answer"]()
    assert [(turn.history, turn.message_index, turn.kept_tokens) for turn in cut.turns] == [(0, 1, 4), (0, 1, None)]
    assert [[turn.index for turn in turns] for turns in turns_of_messages(cut)] == [[], [0, 1]]


def test_images_are_references_to_the_files_of_the_run(tmp_path: Path) -> None:
    image = picture(16, 24)
    segment = Segment()
    inputs = {"image_grid_thw": [[1, 4, 6]]}
    segment.append_context([1, 2, 3], [Media(kind="image", start=1, length=1, source=image, inputs=inputs)])
    segment.append_context([4, 5], [Media(kind="video", start=0, length=2, source=[image, image], inputs={})])
    message = {"role": "user", "content": [{"type": "image", "image": image}]}
    live = Trajectory(id="1", group="1", row=a_row(), messages=[message], segments=[segment])
    write_trajectories(tmp_path / "trajectories.jsonl", [live])
    (one,) = read(tmp_path)
    first, second = one.segments[0].media
    reference = StoredImage(digest(image), (16, 24), tmp_path / "media")
    assert (first.source, first.inputs) == (reference, inputs)
    assert (second.source, second.inputs) == ([reference] * 2, {})
    assert reference.path == tmp_path / "media" / f"{digest(image)}.png"
    assert StoredImage("0" * 64, None, tmp_path / "media").path is None
    write_trajectories(tmp_path / "again.jsonl", [one])
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "trajectories.jsonl").read_bytes()


# whatever users and models put into it

TEXTS = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["\ud83d\ude00", "\ud83d" + "\ude00", "\x00", "\\ud83d", "\u2028", "sha256:abc", "data:image/png;base64,xyz"]
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=4) | st.builds(object)

VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXTS | st.integers() | st.none() | st.just("type"), inner, max_size=3)
        | st.just({"type": "image", "image": b"broken"})
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.dictionaries(TEXTS, VALUES, max_size=3),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    VALUES,
    TEXTS,
    st.lists(st.floats(width=32), max_size=3),
    st.integers(0, 70),
    st.booleans(),
)
def test_whatever_a_conversation_holds_it_is_read_and_written_again(
    tmp_path_factory: pytest.TempPathFactory,
    info: dict[str, Any],
    columns: dict[str, Any],
    content: Any,
    text: str,
    logprobs: list[float],
    depth: int,
    huge: bool,
) -> None:
    deep: Any = content
    for _ in range(depth):
        deep = [deep]
    segment = Segment()
    segment.append_context([1])
    segment.token_ids.extend([7] * len(logprobs))
    segment.logprobs.extend(logprobs)
    segment.turn.extend([0] * len(logprobs))
    segment.version.extend([0] * len(logprobs))
    parsed = ToolCall(id=text, name=text, arguments={text: deep}, text=text, written_id=text, error=text)
    outcome = ToolOutcome(id=text, name=text, arguments={}, content=content, reward=math.nan, seconds=math.inf)
    turn = Turn(
        index=0,
        message={"role": "assistant", "content": text, "deep": deep},
        text=text,
        message_index=1,
        reasoning=text,
        reasoning_opening=text,
        weight=math.nan if huge else 1.0,
        calls=(parsed,),
        outcomes=(outcome,),
        reward=math.inf,
        info={**info, "deep": deep, 5: 1, "5": 2, "n": 10**5000 if huge else 1},
        finish_reason=text,
    )
    live = Trajectory(
        id=text,
        group=text,
        row=Row(id=text, messages=[], fields={**columns, "deep": deep}),
        messages=[{"role": "user", "content": content}, turn.message],
        previous_histories=[],
        turns=[turn],
        segments=[segment],
        tools=[{"type": "function", "function": {"name": text, "deep": deep}}],
        error=Failure("environment", text),
        rewards={text: math.nan if huge else 1.0},
    )
    folder = tmp_path_factory.mktemp("run")
    write_trajectories(folder / "trajectories.jsonl", [live])
    (one,) = read(folder)
    write_trajectories(folder / "again.jsonl", [one])
    assert (folder / "again.jsonl").read_bytes() == (folder / "trajectories.jsonl").read_bytes()
    assert len(one.segments[0]) == len(segment)


# one of many


def a_file(folder: Path, *ids: str) -> Path:
    path = folder / "trajectories.jsonl"
    write_trajectories(path, [hold(Says("a"), row=a_row(id=id)) for id in ids])
    return path


def ids(run: Path) -> list[str]:
    return [one.id for one in RecordedTrajectories(run)]


def test_one_trajectory_opens_without_the_others(tmp_path: Path) -> None:
    path = a_file(tmp_path, "a", "b", "c")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"x" * (len(lines[1]) - 1) + b"\n" + lines[2])  # the second line is damaged
    run = record.RecordedTrajectories(tmp_path)
    assert (len(run), run[0].id, run[-1].id, run[2].id) == (3, "a/0", "c/0", "c/0")
    assert [one.id for one in run[2:]] == ["c/0"]
    with pytest.raises(RunError, match=rf"^{path}:2 is not JSON \(Expecting value at column 1\)"):
        _ = run[1]
    with pytest.raises(IndexError, match=rf"there is no trajectory 3: {path} has 3"):
        _ = run[3]
    assert next(record.read(tmp_path)).id == "a/0"  # each is read when it is asked for


def test_the_index_is_cached_and_follows_the_file(tmp_path: Path) -> None:
    path = a_file(tmp_path, "a", "b")
    index = tmp_path / "trajectories.jsonl.index"
    assert (ids(tmp_path), index.is_file()) == (["a/0", "b/0"], True)
    cached = index.read_bytes()
    assert (ids(tmp_path), index.read_bytes()) == (["a/0", "b/0"], cached)
    a_file(tmp_path, "c")  # appended: the index is extended
    assert ids(tmp_path) == ["a/0", "b/0", "c/0"]
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, len(lines[0]))  # cut back to a checkpoint
    assert ids(tmp_path) == ["a/0"]
    a_file(tmp_path, "longer", "d", "e")  # and gone on with
    assert ids(tmp_path) == ["a/0", "longer/0", "d/0", "e/0"]
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))  # of the same size
    assert ids(tmp_path) == ["e/0", "d/0", "longer/0", "a/0"]


@pytest.mark.parametrize("damage", [b"", b"\n", b"{}\n", b"[1]\n" + b"x" * 9, "cut", "flipped"])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: bytes | str) -> None:
    a_file(tmp_path, "a", "b", "c")
    index = tmp_path / "trajectories.jsonl.index"
    assert len(ids(tmp_path)) == 3
    good = index.read_bytes()
    bad = good[:-1] if damage == "cut" else good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    index.write_bytes(damage if isinstance(damage, bytes) else bad)
    assert ids(tmp_path) == ["a/0", "b/0", "c/0"]
    assert index.read_bytes() == good


def test_an_index_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    a_file(tmp_path, "a")
    (tmp_path / "trajectories.jsonl.index").mkdir()
    assert ids(tmp_path) == ["a/0"]


def test_a_last_line_that_was_not_finished_is_skipped_and_a_finished_one_without_newline_is_not(tmp_path: Path) -> None:
    path = a_file(tmp_path, "a", "b")
    whole = path.read_bytes()
    for end in (whole[:-1], whole[:-2], whole[: whole.index(b"\n") + 5]):
        path.write_bytes(end)
        found = ["a/0", "b/0"] if end == whole[:-1] else ["a/0"]
        assert ids(tmp_path) == [one.id for one in read(tmp_path)] == found
    path.write_bytes(b"")
    assert ids(tmp_path) == [one.id for one in read(tmp_path)] == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=rf"there is no file {tmp_path}/trajectories.jsonl; give a run directory or a file"
    ):
        RecordedTrajectories(tmp_path)
    with pytest.raises(RunError, match=rf"there is no file {tmp_path}/x.jsonl"):
        list(read(tmp_path / "x.jsonl"))


# damaged lines, other versions


def a_record() -> dict[str, Any]:
    return json.loads(json.dumps(trajectory_record(with_tools())))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("id", 5, "id must be a text; got 5"),
        ("reward", "1", "reward must be a number; got '1'"),
        ("stop", "tired", "stop must be one of done, max_turns, length, .* got 'tired'"),
        ("messages", {}, "messages must be a list; got {}"),
        ("messages.0", {"content": "x"}, "messages.0 must be a message with a role; got {'content': 'x'}"),
        ("previous_histories", [5], "previous_histories.0 must be a list of messages; got 5"),
        ("error", {"kind": "x"}, "the key error.message is missing"),
        ("turns.0", 5, "turns.0 must be an object; got 5"),
        ("turns.1.text", None, "turns.1.text must be a text; got None"),
        ("turns.1.weight", True, "turns.1.weight must be a number; got True"),
        ("turns.0.advantage", "x", "turns.0.advantage must be a number; got 'x'"),
        ("turns.0.advantage", ["x"], r"turns.0.advantage must be a list of numbers; got \['x'\]"),
        ("turns.0.history", 1, "turns.0.history must be one of the 1 histories, counted from 0; got 1"),
        ("turns.0.message_index", 6, "turns.0.message_index must be one of 6 messages, from 0; got 6"),
        ("turns.0.train_on", 1, "turns.0.train_on must be true or false; got 1"),
        ("turns.0.seconds", [], r"turns.0.seconds must be an object; got \[\]"),
        ("turns.0.tool_calls.1.content", 5, "turns.0.tool_calls.1.content must be a text; got 5"),
        ("segments.0.token_ids.0", 0.5, "segments.0.token_ids must be a list of integers of 32 bits"),
        ("segments.0.token_ids.0", 2**31, "segments.0.token_ids must be a list of integers of 32 bits"),
        ("segments.0.logprobs.0", "x", "segments.0.logprobs must be a list of numbers"),
        ("segments.0.logprobs.0", 10**400, "segments.0.logprobs must be a list of numbers"),
        ("segments.0.turn.0", 2, r"segments.0.turn must be indexes of the 2 turns, or -1; got \[-?\d, 2\]"),
        ("segments.0.version", [], r"segments.0 must have columns of equal length; got \[0, \d+\]"),
        ("segments.0.media", [{"kind": "sound"}], "segments.0.media.0.kind must be image or video; got 'sound'"),
        ("logprob_kind", "x", "logprob_kind must be one of "),
        (
            "template_mismatch_kind",
            "x",
            "template_mismatch_kind must be one of context, completion, template_error; got 'x'",
        ),
        ("schema", 0, "has schema 0, and this version of turnwise reads the schemas 1 to 3: update turnwise"),
        ("schema", 4, "has schema 4, and this version of turnwise reads the schemas 1 to 3: update turnwise"),
        ("segments.0.trainer_logprobs", [0.0], "segments.0 must have columns of equal length"),
        ("schema", "2", "schema must be an integer; got '2'"),
    ],
)
def test_a_damaged_line_is_refused_with_the_value_the_rule_and_the_place(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    damaged = a_record()
    *parents, last = path.split(".")
    node: Any = damaged
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[int(last) if isinstance(node, list) else last] = value
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps(a_record()) + "\n" + json.dumps(damaged) + "\n")
    for one in (lambda: list(read(tmp_path)), lambda: RecordedTrajectories(tmp_path)[1]):
        with pytest.raises(RunError, match=rf"^{file}:2 (is damaged: )?{message}"):
            one()
    assert RecordedTrajectories(tmp_path)[0].id == "r1/0"


def test_a_missing_key_is_refused_and_bytes_that_are_no_text_too(tmp_path: Path) -> None:
    damaged = a_record()
    del damaged["turns"][1]["text"]
    with pytest.raises(RunError, match=r"^it is damaged: the key turns.1.text is missing. Restore the file"):
        decode_trajectory(damaged, where="it")
    file = tmp_path / "trajectories.jsonl"
    for line, message in (
        (b'{"id": "\xff"}', "is damaged: it is not UTF-8"),
        (b"[1]", "is damaged: a line is a JSON object"),
    ):
        file.write_bytes(line + b"\n")
        with pytest.raises(RunError, match=f"{file}:1 {message}"):
            list(read(file))


def test_lines_from_before_there_was_a_schema_are_read() -> None:
    old = a_record()
    for name in ("schema", "started"):
        del old[name]
    for turn in old["turns"]:
        for name in ("message_index", "started", "rewards"):
            turn.pop(name, None)
    one = decode_trajectory(old, where="it")
    assert (one.step, one.started, [turn.message_index for turn in one.turns]) == (None, None, [None, None])
    assert [[turn.index for turn in turns] for turns in turns_of_messages(one)] == [[], [0], [], [], [], [1]]
    assert one.row.messages == [{"role": "user", "content": "1+2?"}]


def test_the_opening_of_the_reasoning_is_read_under_its_former_key_too() -> None:
    trajectory = hold(Says("Yes."), SingleTurn)
    trajectory.turns[0].reasoning_opening = "<think>\n"
    line = trajectory_record(trajectory)
    turn = line["turns"][0]
    assert (turn["reasoning_opening"], "thought_opening" in turn) == ("<think>\n", False)
    former = {"thought_opening" if key == "reasoning_opening" else key: value for key, value in turn.items()}
    read_back = decode_trajectory({**line, "turns": [former]}, where="it")
    assert read_back.turns[0].reasoning_opening == "<think>\n"


def test_a_template_mismatch_is_read_back_with_its_kind_and_from_earlier_versions_without() -> None:
    record = trajectory_record(with_mismatch(MismatchKind.TEMPLATE_ERROR))
    assert (record["template_mismatch"], record["template_mismatch_kind"]) == ("tokens 3 to 4", "template_error")
    assert decode_trajectory(record, where="it").template_mismatch == TemplateMismatch(
        MismatchKind.TEMPLATE_ERROR, "tokens 3 to 4"
    )
    del record["template_mismatch_kind"]
    assert decode_trajectory(record, where="it").template_mismatch == TemplateMismatch(None, "tokens 3 to 4")


def test_links_and_times_are_a_small_part_of_the_record() -> None:
    one = hold(Says("x" * 60, "y" * 60), lambda: Keeps())
    now = trajectory_record(one)
    size = len(json.dumps(now, separators=(",", ":")))
    for turn in now["turns"]:
        for name in ("message_index", "started"):
            turn.pop(name, None)
    for name in ("schema", "started"):
        now.pop(name, None)
    assert size / len(json.dumps(now, separators=(",", ":"))) < 1.05
    assert size < len(json.dumps(now))  # what the spaces after commas took


class Keeps(SingleTurn):
    """Asks twice."""

    async def step(self, turn: Turn) -> Reply:
        return user_message("More.") if turn.index == 0 else Reply(done=True)


def test_values_and_returns_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Those of turns are numbers, those of tokens are lists; a conversation without a critic has neither."""
    live = [hold(Says("Yes.", "No."), rewrites) for _ in range(3)]
    of_turns, of_tokens, without = live
    counts = [sum(segment.turn.count(turn.index) for segment in of_tokens.segments) for turn in of_tokens.turns]
    assert all(counts)
    of_turns.advantages, of_turns.values, of_turns.returns = [0.1, -0.2], [0.3, 1e-9], [0.75, -1.0]
    of_tokens.advantages, of_tokens.values, of_tokens.returns = (  # type: ignore[assignment]
        [[(place + token / 7) * sign for token in range(count)] for place, count in enumerate(counts)]
        for sign in (1.0, -1.0, 1 / 3)
    )
    without.advantages = [0.5, 0.5]
    path, again = tmp_path / "trajectories.jsonl", tmp_path / "again.jsonl"
    write_trajectories(path, live)
    for one, other in zip(live, read(path), strict=True):
        for name in ("advantages", "values", "returns"):
            numbers = [entry if isinstance(entry, float) else list(entry) for entry in getattr(other, name)]
            assert numbers == getattr(one, name), name
    write_trajectories(again, read(path))
    assert again.read_bytes() == path.read_bytes()
    turns = [json.loads(line)["turns"] for line in path.read_text().splitlines()]
    assert [[(turn["value"], turn["return"]) for turn in of] for of in turns[:2]] == [
        list(zip(one.values, one.returns, strict=True)) for one in live[:2]
    ]
    assert all("value" not in turn and "return" not in turn for turn in turns[2])


@pytest.mark.parametrize("value", [7, None, "seven", {"a": [1]}])
def test_a_column_of_the_name_id_is_recorded_beside_the_id_of_the_row(value: Any, tmp_path: Path) -> None:
    one = hold(Says("a"), row=a_row("Hi", id="3", answer="4"))
    one.row = Row(id="3", messages=one.row.messages, fields={"id": value, "answer": "4"})
    path = tmp_path / "trajectories.jsonl"
    write_trajectories(path, [one])
    (found,) = read(path)
    assert (found.row.id, found.row.fields, found.row["id"]) == ("3", {"answer": "4", "id": value}, value)
    written = json.loads(path.read_text())
    assert (written["row"], written["row_columns"]) == ({"answer": "4", "id": "3"}, {"id": value})
    assert list(written["row"]) == ["answer", "id"]  # wherever the column stood: a copy has the same bytes
    again = tmp_path / "again.jsonl"
    write_trajectories(again, [found])
    assert again.read_bytes() == path.read_bytes()


# Opening one conversation of a large record reads its line and the index, and not the other conversations.


class _CountingFile(io.FileIO):
    """A file that counts the bytes that the operating system returns, read-ahead of buffers included."""

    counts: ClassVar[Counter[str]] = Counter()

    def readinto(self, buffer: Any, /) -> int:
        size = super().readinto(buffer)
        self.counts[Path(str(self.name)).name] += size
        return size

    def readall(self) -> bytes:
        data = super().readall()
        self.counts[Path(str(self.name)).name] += len(data)
        return data


def _bytes_read(path: Path, id: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that a new reader reads of each file to open one conversation."""
    opened = Path.open

    def counting(file: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode != "rb":
            return opened(file, mode, *arguments, **options)
        return io.BufferedReader(_CountingFile(file))

    with monkeypatch.context() as patch:
        _CountingFile.counts = Counter()
        patch.setattr(Path, "open", counting)
        (trajectory,) = RecordedTrajectories(path).with_id(id)
    assert trajectory.id == id
    return dict(_CountingFile.counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trajectories.jsonl", "trajectories.jsonl.gz"])
def test_the_bytes_read_do_not_grow_with_the_number_of_conversations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(json.dumps(next(record_benchmark.made())))
    line = len(record_benchmark.line(0, record))
    # the line, and the last line, which shows that the index belongs to the file; a part of a compressed file has 256 kB of lines
    bound = 2 * line + 4 * io.DEFAULT_BUFFER_SIZE if name.endswith(".jsonl") else 4 * 2**18
    of_record, of_index = {}, {}
    for count in (500, 4000):
        path = tmp_path / str(count) / name
        path.parent.mkdir()
        record_benchmark.write(path, iter([record] * count))
        RecordedTrajectories(path)  # builds the index, once
        read = _bytes_read(path, record_benchmark.id_of(count // 2), monkeypatch)
        of_record[count], of_index[count] = read[name], read[f"{name}.index"]
        assert read[name] <= bound
        assert set(read) == {name, f"{name}.index"}
        assert of_index[count] <= 64 * count + 4096  # 6 MB for 100,000 conversations
    assert of_record[4000] <= 1.5 * of_record[500] + io.DEFAULT_BUFFER_SIZE
    assert path.stat().st_size > 20 * of_record[4000]


# texts of tokens


def save_tokenizer(folder: Path, *words: str) -> Path:
    """A model directory with a tokenizer of these tokens."""
    folder.mkdir(parents=True)
    Tokenizer(WordLevel(dict(zip(words, range(len(words)), strict=True)), words[0])).save(
        str(folder / "tokenizer.json")
    )
    return folder


def test_tokens_of_a_frozen_policy_are_those_of_its_own_tokenizer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_tokenizer(run / "checkpoint", "mine")
    own, past = save_tokenizer(tmp_path / "own", "other"), save_tokenizer(tmp_path / "past", "earlier")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(own)}), encoding="utf-8"
    )
    policies = [
        {"name": "other", "path": str(own)},
        {"name": "adapter", "path": str(tmp_path / "adapter")},
        {"name": "reference", "path": None, "reference": True},
        {"name": "gone", "path": str(tmp_path / "gone")},
        {"name": "server", "path": None, "endpoint": {"url": "u"}},
    ]
    options = {"policies": policies, "reference": {"path": str(past)}}
    (run / "config.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    expected = {"": "mine", "other": "other", "adapter": "other", "reference": "earlier", "server": "mine"}
    for policy, word in expected.items():
        decode = token_texts(run, policy)
        assert decode is not None
        assert decode(0) == word
    assert token_texts(run, "gone") is None  # other tokens than those of the run: no text is better than a wrong one
    line = {**viewed_run.conversation(0), "policy": "other", "id": "0:0/0@1"}
    line["segments"] = [{**one, "token_ids": [0] * len(one["token_ids"])} for one in line["segments"]]
    (run / "trajectories.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    viewed = ViewedRun(run)
    viewed.indexes["train"].look_again()
    assert set(viewed.conversation("train", 0)["token_texts"][0]) == {"other"}
    viewed.close()
