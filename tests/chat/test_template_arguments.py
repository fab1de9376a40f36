"""Further arguments of a chat template (`chat_template_kwargs`): in every rendering, one profile per set, no argument ignored."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.conversations import a_row, hold, scripted, spoken
from support.families import family_renderer, template_files
from support.recipes import save_recipe
from support.servers import Answer, serving
from support.templates import SWITCHES
from support.tiny import save_model
from turnwise import assembly
from turnwise.chat.probes import TOOL
from turnwise.chat.renderer import Renderer
from turnwise.chat.template_arguments import refuse_unread_arguments
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.doctor.examine import examine
from turnwise.environments.environment import environment
from turnwise.errors import DataError, RunError, TemplateError
from turnwise.record.reader import read
from turnwise.runs.run_state import read_inputs
from turnwise.sft.fine_tune import conversation_tokens
from turnwise.sft.replay import lines
from turnwise.types import Message, Opening, Reply, Resume, Row, Trajectory, Turn

# Further arguments of a chat template (`chat_template_kwargs`): in every rendering, one profile per set, no argument
# ignored.


FILES = {path.stem: path for path in template_files()}

real = pytest.mark.skipif(not FILES, reason="no chat templates on this machine: pip install trl==1.16.0")

NO_THINKING = {"enable_thinking": False}

EMPTY = "<think>\n\n</think>\n\n"

ASKED: Message = {"role": "user", "content": "Five and five?"}

MORE: Message = {"role": "user", "content": "Are you sure?"}

ANSWER: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "10"}

BARE: Message = {"role": "assistant", "content": "It is ten."}

CALLS = [{"id": "call_0", "type": "function", "function": {"name": "probe_tool", "arguments": {"text": "5+5"}}}]

CALL: Message = {"role": "assistant", "content": "", "tool_calls": CALLS}


@environment
async def asks_back(row: Row, replies: Sequence[Reply], tools: bool = False) -> AsyncGenerator[Opening | Reply, Turn]:
    yield Opening(messages=row.messages, tools=[TOOL] if tools else [])
    for reply in replies:
        yield reply
    yield Reply(done=True)


def held(renderer: Renderer, said: Sequence[str], *replies: Reply, **context: Any) -> Trajectory:
    row = context.pop("row", None) or a_row("Five and five?")
    tools = context.pop("tools", False)
    trajectory = hold(
        scripted(list(said), renderer=renderer),
        lambda: asks_back(replies=replies, tools=tools),
        renderer=renderer,
        row=row,
        **context,
    )
    assert trajectory.error is None, trajectory.error
    return trajectory


def prompts(trajectory: Trajectory) -> list[list[int]]:
    """What the model was shown before each turn."""
    return [
        list(segment.token_ids[: segment.turn.index(turn)])
        for segment in trajectory.segments
        for turn in sorted({one for one in segment.turn if one >= 0})
    ]


def served(renderer: Renderer, trajectory: Trajectory, arguments: Mapping[str, Any]) -> list[list[int]]:
    """What a server shows it under these arguments, by the tokenizer alone."""
    tools: Any = list(trajectory.tools) or None
    found: list[list[int]] = []
    for place, message in enumerate(trajectory.messages):
        if message["role"] == "assistant":
            text = renderer.tokenizer.apply_chat_template(
                trajectory.messages[:place], tools=tools, add_generation_prompt=True, tokenize=False, **arguments
            )
            found.append(renderer.tokenizer.encode(text, add_special_tokens=False))
    return found


def test_the_arguments_are_in_the_first_prompt_and_behind_every_turn() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES), chat_template_kwargs=NO_THINKING)
    trajectory = held(renderer, ["Ten.", "Yes."], Reply(messages=[MORE]))
    (segment,) = trajectory.segments
    assert [text for _, text in spoken(segment, renderer)] == [
        f"<|im_start|>user\nFive and five?<|im_end|>\n<|im_start|>assistant\n{EMPTY}",
        "Ten.<|im_end|>",
        f"\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}",
        "Yes.<|im_end|>",
    ]
    assert trajectory.template_mismatch is None
    assert [turn.message["content"] for turn in trajectory.turns] == ["Ten.", "Yes."]


def test_a_row_has_its_own_arguments_and_a_profile_for_them() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    plain = held(renderer, ["Ten."])
    own = held(renderer, ["Ten."], row=a_row("Five and five?", chat_template_kwargs=NO_THINKING))
    assert spoken(plain.segments[0], renderer)[0][1].endswith("<|im_start|>assistant\n")
    assert spoken(own.segments[0], renderer)[0][1].endswith(f"<|im_start|>assistant\n{EMPTY}")
    assert renderer.for_arguments({}) is renderer
    assert renderer.for_arguments(NO_THINKING) is renderer.for_arguments({"enable_thinking": False})
    assert renderer.for_arguments(NO_THINKING).for_arguments({}) is renderer


def test_the_arguments_of_a_row_replace_those_of_the_recipe_by_name() -> None:
    template = SWITCHES + "{{ mood | default('calm') }}"
    renderer = Renderer(byte_tokenizer(template), chat_template_kwargs={"enable_thinking": False, "mood": "wild"})
    text = renderer.for_arguments({"enable_thinking": True}).encode_opening([ASKED]).text
    assert EMPTY not in text
    assert text.endswith("wild")


def test_one_and_true_are_different_values() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES + "{{ level }}"), chat_template_kwargs={"level": 1})
    assert renderer.for_arguments({"level": True}).encode_opening([ASKED]).text.endswith("True")
    assert renderer.for_arguments({"level": 1}) is renderer


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"enable_thinkng": False},
            r"has 'enable_thinkng', which the chat template of .* never reads \(it reads: enable_thinking\): correct the name, "
            r"or remove it; did you mean 'enable_thinking'\?",
        ),
        ({"content": "x"}, "never reads"),
        ({"tools": []}, "'tools', which turnwise gives to the template itself: remove it"),
        ({"add_generation_prompt": False}, "which turnwise gives to the template itself"),
        ({"chat_template": "x"}, "put the template into the model's directory"),
        ({"tokenize": True}, "is a parameter of apply_chat_template and no argument"),
        ({"enable_thinking": "false"}, "enable_thinking='false', a text, .* write false without quotes"),
        ({"enable_thinking": {1, 2}}, "must be plain data"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(arguments: Mapping[str, Any], told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        Renderer(byte_tokenizer(SWITCHES)).for_arguments(arguments)


def test_names_are_found_behind_the_tags_that_transformers_and_jinja_add() -> None:
    template = "{% generation %}{{ one }}{% endgeneration %}{% for m in messages %}{% if two %}{% break %}{% endif %}{% endfor %}"
    refuse_unread_arguments({"one": 1, "two": 2}, template, "the tokenizer")
    with pytest.raises(TemplateError, match=r"it reads: one, two"):
        refuse_unread_arguments({"m": 1}, template, "the tokenizer")


def test_a_row_whose_arguments_are_never_read_fails_its_conversation() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    row = a_row("Hi", chat_template_kwargs={"thinking": False})
    trajectory = hold(scripted(["Ten."], renderer=renderer), renderer=renderer, row=row)
    assert trajectory.error is not None
    assert trajectory.error.kind == "tokens"
    assert "'thinking', which the chat template of" in trajectory.error.message


def test_other_arguments_in_the_middle_begin_a_new_segment_that_is_rendered_in_full() -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    more = Reply(messages=[MORE], chat_template_kwargs=NO_THINKING)
    trajectory = held(
        renderer, ["Ten.", "Yes.", "Sure."], more, Reply(messages=[MORE], chat_template_kwargs=NO_THINKING)
    )
    assert trajectory.template_mismatch is None
    first, second = trajectory.segments
    assert spoken(first, renderer)[0][1].endswith("<|im_start|>assistant\n")
    texts = [text for _, text in spoken(second, renderer)]
    assert texts[0].endswith(
        f"Ten.<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
    )
    assert texts[2].endswith(
        f"Are you sure?<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
    )  # the same arguments: the same segment
    back = held(
        renderer, ["Ten.", "Yes."], Reply(messages=[MORE], chat_template_kwargs={}), row=a_row("Five and five?")
    )
    assert len(back.segments) == 1


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(chat_template_kwargs="no", messages=[MORE]), "give a dictionary of the template's arguments"),  # type: ignore[arg-type]
        (Reply(chat_template_kwargs={}, done=True), "there is no following turn"),
        (Reply(chat_template_kwargs={}, resume=Resume()), "the prompt of the resumed turn is rendered already"),
    ],
)
def test_a_reply_with_arguments_that_cannot_be_used_fails(reply: Reply, told: str) -> None:
    renderer = Renderer(byte_tokenizer(SWITCHES))
    trajectory = hold(scripted(["Ten.", "x"], renderer=renderer), lambda: asks_back(replies=[reply]), renderer=renderer)
    assert trajectory.error is not None
    assert told in trajectory.error.message


def test_an_unchanged_context_that_occurs_twice_is_no_mismatch() -> None:
    """The template writes the last turn with an empty block of reasoning and earlier ones without: the same words of a user (a
    scripted user says them again and again) must be found at their own place."""
    template = SWITCHES.replace(
        "+ content +",
        "+ ('<think>\n\n</think>\n\n' if message.role == 'assistant' and loop.last and '</think>' not in content else '')"
        " + content +",
    )
    renderer = Renderer(byte_tokenizer(template), chat_template_kwargs=NO_THINKING)
    trajectory = held(renderer, ["Ten.", "Ten.", "Ten."], Reply(messages=[MORE]), Reply(messages=[MORE]))
    assert trajectory.template_mismatch is None


SETS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"enable_thinking": False}),
    ("qwen3", {"enable_thinking": True}),
    ("qwen3_training", {"enable_thinking": False}),
    ("qwen3_5_think", {"enable_thinking": False}),
    ("qwen3_5_nothink", {"enable_thinking": True}),
    ("qwen3_6", {"enable_thinking": False}),
    ("qwen3_6", {"preserve_thinking": True}),
    ("glm4moe", {"enable_thinking": False}),
    ("glm4moe", {"enable_thinking": True}),
    ("gemma4", {"enable_thinking": True}),
    ("nemotron_3_nano", {"enable_thinking": False}),
    ("nemotron_3_ultra", {"enable_thinking": False}),
    ("lfm2_2_5_v2", {"thinking": False}),
]


@real
@pytest.mark.parametrize("with_call", [False, True])
@pytest.mark.parametrize(("stem", "arguments"), SETS)
def test_real_templates_are_right_under_their_arguments(stem: str, arguments: dict[str, Any], with_call: bool) -> None:
    base = family_renderer(FILES[stem])
    renderer = base.for_arguments(arguments)
    first = (CALL, [ANSWER]) if with_call else (BARE, [MORE])
    rounds: list[tuple[Message, list[Message]]] = [first, (BARE, [MORE]), (BARE, [])]
    said = lines(renderer, [ASKED], rounds, [TOOL] if with_call else [])
    replies = [Reply(messages=answers) for _, answers in rounds[:-1]]
    row = a_row("Five and five?", chat_template_kwargs=arguments)
    kept = held(base, said, *replies, row=row, tools=with_call)
    assert kept.template_mismatch is None
    assert [len(turn.calls) for turn in kept.turns] == [int(with_call), 0, 0]
    assert [turn.message["content"] for turn in kept.turns[1:]] == ["It is ten."] * 2
    assert prompts(kept)[0] == served(renderer, kept, arguments)[0]
    branched = held(base, said, *replies, row=row, tools=with_call, thinking="branch")
    assert branched.template_mismatch is None
    ours, theirs = (
        ["".join(renderer.decode(prompt).split()) for prompt in shown]
        for shown in (prompts(branched), served(renderer, branched, arguments))
    )
    assert ours == theirs  # but for the line breaks of the model's own empty reasoning


# `model.chat_template_kwargs` and the column of the same name: in rollouts, training, fine-tuning, evaluations, at
# endpoints.


RUN_EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

PLAIN = "<|im_start|>assistant\n"

OFF = {"enable_thinking": False}

ON = {"enable_thinking": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template has the switch."""
    path = save_model(tmp_path_factory.mktemp("model"))
    (path / "chat_template.jinja").write_text(SWITCHES, encoding="utf-8")
    return path


def rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def asked(number: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1?", "answer": str(number + 1), **columns}


def recipe(folder: Path, model: Path, *given: dict[str, Any], **options: Any) -> Path:
    train = rows(folder / "train.jsonl", *(given or (asked(1), asked(2, chat_template_kwargs=ON))))
    small = {
        "limits": {"turns": 2, "tokens_per_turn": 6},
        "train": {"steps": 1, "batch_size": 2, "group_size": 2},
        "deterministic": True,
    }
    options = {**small, "data": {"train": train, "eval": train}, **options}
    return save_recipe(folder, model, **options)


def run_prompts(run: Path) -> dict[str, bool]:
    """Of each row: whether the first prompt of its conversations ends with the empty block."""
    tokenizer = byte_tokenizer()
    found: dict[str, bool] = {}
    for trajectory in read(run):
        (segment, *_) = trajectory.segments
        text = str(tokenizer.decode(list(segment.token_ids[: segment.turn.index(0)])))
        assert text.endswith((RUN_EMPTY, PLAIN))
        found[trajectory.row.id] = text.endswith(RUN_EMPTY)
    return found


def test_rollouts_and_evaluations_use_the_arguments(tmp_path: Path, model: Path) -> None:
    path = str(recipe(tmp_path, model))
    switch = "model.chat_template_kwargs.enable_thinking=false"
    assert main(["rollout", path, switch, "--out", str(tmp_path / "off")]) == 0
    assert run_prompts(tmp_path / "off") == {"1": True, "2": False}
    assert main(["rollout", path, "--out", str(tmp_path / "on")]) == 0
    assert run_prompts(tmp_path / "on") == {"1": False, "2": False}
    assert main(["eval", path, switch, "--out", str(tmp_path / "eval")]) == 0
    assert run_prompts(tmp_path / "eval") == {"1": True, "2": False}


@pytest.mark.slow
def test_training_uses_them_and_a_resumed_run_must_keep_them(tmp_path: Path, model: Path) -> None:
    path = str(recipe(tmp_path, model, checkpoint={"every": 1}))
    switch = "model.chat_template_kwargs={enable_thinking: false}"
    assert main(["train", path, switch]) == 0
    run = tmp_path / "run"
    assert run_prompts(run) == {"1": True, "2": False}
    assert [t.template_mismatch for t in read(run)] == [None] * 4
    assert main(["train", path, switch, "resume=auto", "train.steps=2"]) == 0
    config, _ = load(path, ["resume=auto", "train.steps=3"])
    with pytest.raises(RunError, match=r"model\.chat_template_kwargs=\{\}.*the run used \{'enable_thinking': False\}"):
        read_inputs(config, "train", lambda config, held_out: assembly.rows(config, held_out=held_out))


def test_fine_tuning_trains_the_answer_behind_the_prompt_of_the_row(tmp_path: Path, model: Path) -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    train = rows(
        tmp_path / "talks.jsonl",
        {"messages": talk},
        {"messages": talk, "chat_template_kwargs": ON},
        {"messages": talk, "chat_template_kwargs": json.dumps(OFF)},
    )
    path = save_recipe(
        tmp_path, model, data={"train": train}, sft={"steps": 1, "batch_size": 3},
        environment="turnwise.environments.environment:SingleTurn",
    )  # fmt: skip
    assert main(["sft", str(path)]) == 0
    assert run_prompts(tmp_path / "run") == {"1": False, "2": False, "3": True}
    config, _ = load(path)
    plain, _, off = (one.tokens for one in conversation_tokens(config, assembly.conversations(config)))
    assert off - plain == len(byte_tokenizer().encode("<think>\n\n</think>\n\n"))


def test_an_endpoint_gets_them_with_each_request(tmp_path: Path) -> None:
    asked_with: list[Any] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        asked_with.append(question.get("chat_template_kwargs"))
        return Answer({"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}]})

    with serving(answer) as server:
        path = recipe(
            tmp_path, Path("some/model"), asked(1), asked(2, chat_template_kwargs=ON),
            engine={"name": "openai", "url": f"{server.url}/v1"}, deterministic=False, max_concurrent=1, limits={},
            environment="turnwise.environments.environment:SingleTurn",
        )  # fmt: skip
        assert main(["rollout", str(path), "--out", str(tmp_path / "plain")]) == 0
        assert asked_with == [None, ON]
        both = "model.chat_template_kwargs={enable_thinking: false, level: 2}"
        assert main(["rollout", str(path), both, "--out", str(tmp_path / "both")]) == 0
    assert asked_with[2:] == [{**OFF, "level": 2}, {**ON, "level": 2}]


@pytest.mark.parametrize("kind", ["train", "sft"])
def test_an_argument_that_the_template_never_reads_ends_the_run_at_its_start(
    tmp_path: Path, model: Path, kind: Any
) -> None:
    wrong = {"enable_thinkng": False}
    path = recipe(tmp_path, model, asked(1), asked(2, chat_template_kwargs=wrong))
    with pytest.raises(DataError, match=r"row '2': .*'enable_thinkng', which the chat template of .* never reads"):
        read_inputs(load(path)[0], kind, lambda config, held_out: assembly.rows(config, held_out=held_out))
    with pytest.raises(TemplateError, match=r"never reads \(it reads: enable_thinking\)"):
        assembly.renderer(load(path, ["model.chat_template_kwargs.enable_thinkng=false"])[0])
    with pytest.raises(TemplateError, match="write false without quotes"):
        assembly.renderer(load(path, ['model.chat_template_kwargs.enable_thinking="false"'])[0])


def test_a_rollout_with_an_argument_that_is_never_read_does_not_start(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, model, asked(1, chat_template_kwargs={"thinking": False}))
    assert main(["rollout", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "row '1': chat_template_kwargs has 'thinking'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_doctor_examines_the_template_under_each_set_of_arguments(tmp_path: Path, model: Path) -> None:
    grows = SWITCHES.replace(
        "message.role + '\\n'", "message.role + ('!' if messages | length > 4 and not enable_thinking else '') + '\\n'"
    )
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    path = recipe(tmp_path, model, asked(1), asked(2, chat_template_kwargs=ON), asked(3, chat_template_kwargs=ON))
    (check,) = [one for one in examine(str(model), load(path)[0], weights="never") if one.name == "arguments"]
    assert (check.status, check.text) == (
        "ok", 'the template reads the arguments of the rows: {"enable_thinking": true} (4 rows)',
    )  # fmt: skip
    (other / "chat_template.jinja").write_text(grows, encoding="utf-8")
    path = recipe(tmp_path, other, asked(1), asked(2, chat_template_kwargs=OFF))
    config, _ = load(path, ["model.chat_template_kwargs.enable_thinking=true"])
    checks = {one.name: one for one in examine(str(other), config, weights="never")}
    assert checks["user turns"].status == "ok"
    assert checks["arguments"].status == "note"
    assert checks["arguments"].text.startswith(
        '2 rows with chat_template_kwargs={"enable_thinking": false}: user turns'
    )


@pytest.mark.slow
def test_the_doctor_takes_arguments_of_the_template_without_a_recipe(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked_doctor(*overrides: str) -> str:
        main(["doctor", str(model), "--weights", "never", *overrides])
        return "".join(capsys.readouterr())

    off = asked_doctor("model.chat_template_kwargs.enable_thinking=false")
    assert asked_doctor() == asked_doctor("model.chat_template_kwargs.enable_thinking=true") != off  # on by default
    assert "'thinking', which the chat template of" in asked_doctor("model.chat_template_kwargs={thinking: false}")
    assert "train.lr=1 is an option of a recipe" in asked_doctor("train.lr=1")


def test_the_record_of_a_turn_has_the_arguments_of_its_prompt(tmp_path: Path, model: Path) -> None:
    def arguments(name: str) -> dict[str, list[Any]]:
        return {one.row.id: [turn.chat_template_kwargs for turn in one.turns] for one in read(tmp_path / name)}

    path = str(recipe(tmp_path, model))
    assert main(["rollout", path, "--out", str(tmp_path / "run")]) == 0
    assert arguments("run") == {"1": [{}, {}], "2": [ON, ON]}
    switch = "model.chat_template_kwargs.enable_thinking=false"
    assert main(["rollout", path, switch, "--out", str(tmp_path / "off")]) == 0
    assert arguments("off") == {"1": [OFF, OFF], "2": [ON, ON]}


def test_a_server_with_other_arguments_is_another_recipe(tmp_path: Path, model: Path) -> None:
    from turnwise.rollout_server.wire import differences, served_options

    path = recipe(tmp_path, model)
    here = served_options(load(path, ["model.chat_template_kwargs.enable_thinking=false"])[0])
    (line,) = differences(here, served_options(load(path)[0]))
    assert line == "model.chat_template_kwargs={'enable_thinking': False} here, {} at the server"
