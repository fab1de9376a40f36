"""Users that are scripted, and users, judges and tools that are played by a model."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.conversations import RENDERER, Says, a_row, call, hold, hold_all, scripted
from support.servers import Answer, serving
from turnwise import assembly
from turnwise.assembly.references import named_callable
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import Endpoint, ModelledUser, ScriptedUser, checked_answer
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.options.section import Use
from turnwise.rollout.chat_model import EngineChatModel
from turnwise.rollout.context import Limits
from turnwise.services.json_service import ServiceError
from turnwise.types import Message, Row, Sampling, Trajectory

# Simulated users.


WRONG = "That is not right. Read the question again and have another try."


def test_a_scripted_user_says_its_lines_and_leaves() -> None:
    trajectory = hold(Says("a", "b", "c"), lambda: ScriptedUser(["one", "two"]))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "one", "b", "two", "c"]
    assert trajectory.stop == "done"
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0]


def test_a_scripted_user_without_lines_listens_once() -> None:
    assert hold(Says("a"), ScriptedUser).assistant_texts == ["a"]


def test_the_lines_are_a_list_and_not_one_text() -> None:
    with pytest.raises(TypeError, match="one for each message; got the single text 'one'"):
        ScriptedUser("one")


def check(*said: str, answer: Any = 72, **options: Any) -> list[tuple[float, dict[str, Any], str]]:
    """Reward, info and the message after it, of each turn of a conversation with the checking user."""
    trajectory = hold(Says(*said), functools.partial(checked_answer, **options), row=a_row("?", answer=answer))
    assert (trajectory.stop, trajectory.error) == ("done", None)
    heard = [message["content"] for message in trajectory.messages if message["role"] == "user"][1:]
    heard += [""] * (len(trajectory.turns) - len(heard))
    return [(turn.reward, turn.info, after) for turn, after in zip(trajectory.turns, heard, strict=True)]


def test_a_right_answer_at_the_first_try_earns_one() -> None:
    assert check("It is #### 72") == [(1.0, {"answer": "72", "try": 1}, "")]
    assert check("#### $72.0", answer="24+48 = 72\n#### 72") == [(1.0, {"answer": "72.0", "try": 1}, "")]


def test_a_right_answer_after_a_wrong_one_earns_a_part() -> None:
    assert check("#### 71", "#### 72") == [(0.0, {}, WRONG), (0.5, {"answer": "72", "try": 2}, "")]
    assert check("1", "2", "#### 72", tries=3, retry_factor=0.1, wrong="No.") == [
        (0.0, {}, "No."),
        (0.0, {}, "No."),
        (0.1**2, {"answer": "72", "try": 3}, ""),
    ]


def test_after_the_last_try_the_user_gives_up() -> None:
    assert check("#### 71", "#### 70") == [(0.0, {}, WRONG), (0.0, {"answer": "70", "try": 2}, "")]
    assert check("dunno", tries=1) == [(0.0, {"answer": None, "try": 1}, "")]


def test_how_the_answer_is_found_is_an_option() -> None:
    assert check("it is 72", tries=1) == [(0.0, {"answer": None, "try": 1}, "")]
    assert check("it is 72", tries=1, method="flexible") == [(1.0, {"answer": "72", "try": 1}, "")]


def test_a_row_without_the_answer_is_reported_with_the_fix() -> None:
    trajectory = hold(Says("#### 72"), checked_answer, row=a_row("?", solution=72))
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert trajectory.error.message == (
        "KeyError: row '1' has no column 'answer'; its columns are: solution. "
        "Add the column to the data, or map another column to it: data.columns.answer=<column>"
    )


# A modelled user: behind a real HTTP server, behind an engine, and behind a function.


GREETING = {"role": "user", "content": "Hello! What can I do for you?"}


def says(*texts: str) -> Callable[[dict[str, Any], int], Answer]:
    """A server's answers, one after the other."""
    return lambda question, number: Answer({"choices": [{"message": {"content": texts[number]}}]})


def served(
    *said: str, answer: Any, row: Row | None = None, limits: Any = None, **options: Any
) -> tuple[Trajectory, Any]:
    """A conversation with a user behind a server, and the server."""
    endpoint = {"model": "m", "pause": 0.0, **options.pop("endpoint", {})}
    with serving(answer) as server:
        options = {"endpoint": {"url": f"{server.url}/v1", **endpoint}, "system_prompt": "You buy shoes.", **options}
        limits = limits or Limits(turns=8, tokens_per_turn=400)
        return hold(Says(*said), lambda: ModelledUser(**options), row=row, limits=limits), server


def contents(messages: Any) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def failure(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    return trajectory.error.message


def test_the_roles_are_turned_round_and_the_stop_phrase_ends_it() -> None:
    row = Row(id="1", messages=[{"role": "system", "content": "Sell shoes."}, {"role": "user", "content": "Hi"}])
    trajectory, server = served("Which size?", "Here.", answer=says("Size 40.", "Thank you! [DONE] ignored"), row=row)
    assert contents(trajectory.messages) == [
        "system: Sell shoes.",
        "user: Hi",
        "assistant: Which size?",
        "user: Size 40.",
        "assistant: Here.",
        "user: Thank you!",
    ]
    assert trajectory.stop == "done"
    assert server.paths == ["/v1/chat/completions"] * 2
    assert server.asked[1] == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You buy shoes."},
            GREETING,
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Which size?"},
            {"role": "assistant", "content": "Size 40."},
            {"role": "user", "content": "Here."},
        ],
    }


def test_a_prompt_that_is_nobodys_question_is_opened_by_the_user() -> None:
    row = Row(id="1", messages=[{"role": "system", "content": "Sell shoes."}], fields={"who": "Ann, size 38"})
    trajectory, server = served(
        "Fine.", answer=says("<think>what do I want</think>\nShoes!", "[DONE]"), row=row,
        system_prompt_column="who", greeting="Yes?"
    )  # fmt: skip
    assert contents(trajectory.messages) == ["system: Sell shoes.", "user: Shoes!", "assistant: Fine."]
    assert server.asked[0]["messages"] == [
        {"role": "system", "content": "You buy shoes.\n\nAnn, size 38"},
        {"role": "user", "content": "Yes?"},
    ]


def test_the_prompt_may_be_the_rows_alone() -> None:
    trajectory, server = served(
        "a", answer=says("[DONE]"), row=a_row(who="Bob"), system_prompt=None, system_prompt_column="who"
    )
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "Bob"}
    assert trajectory.stop == "done"
    trajectory, _ = served("a", answer=says("[DONE]"), row=a_row(), system_prompt=None, system_prompt_column="who")
    assert failure(trajectory).startswith("KeyError: row '1' has no column 'who'")


def test_after_so_many_exchanges_the_model_has_the_last_word() -> None:
    trajectory, server = served("a", "b", "c", answer=says("1", "2"), max_user_turns=2, stop_phrase=None)
    assert contents(trajectory.messages) == [
        "user: Hi", "assistant: a", "user: 1", "assistant: b", "user: 2", "assistant: c"
    ]  # fmt: skip
    assert (trajectory.stop, len(server.asked)) == ("done", 2)


def test_the_request_says_what_the_recipe_says_and_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "swordfish")
    endpoint = {"api_key_env": "SOME_KEY", "request": {"temperature": 0.5, "max_tokens": 9}}
    _, server = served("a", answer=says("[DONE]"), endpoint=endpoint)
    assert server.headers[0]["Authorization"] == "Bearer swordfish"
    assert {key: server.asked[0][key] for key in ("temperature", "max_tokens", "model")} == {
        "temperature": 0.5,
        "max_tokens": 9,
        "model": "m",
    }


def test_what_passes_by_itself_is_asked_again() -> None:
    def answer(question: Any, number: int) -> Answer:
        if number == 0:
            return Answer({"error": "busy"}, status=429)
        if number == 1:
            return Answer(hang_up=True)
        return says("", "", "[DONE]")(question, number)

    trajectory, server = served("a", answer=answer, endpoint={"retries": 2})
    assert (trajectory.stop, trajectory.error, len(server.asked)) == ("done", None, 3)


@pytest.mark.parametrize(
    ("answer", "asked", "message"),
    [
        (Answer({"error": "no such model"}, status=404), 1, 'returned the status 404: {"error": "no such model"}'),
        (Answer(b"out of memory", status=500), 2, "was called 2 times: status 500: out of memory"),
        (Answer({"choices": []}), 1, """{"choices": [{"message": {"content": "..."}}]}; it returned {'choices': []}"""),
        (Answer({"choices": [{"message": {"content": None}}]}), 1, "it returned {'choices': [{'message': {'content': None}}]}"),
        (Answer(b"<html>"), 1, "must return JSON; it returned: '<html>'"),
        (Answer({"choices": [{"message": {"content": "<think>hm</think> "}}]}), 1, "the modelled user returned an empty answer"),
        (Answer({}, seconds=9), 2, "was called 2 times: no answer within 0.5 s"),
    ],
)  # fmt: skip
def test_an_endpoint_that_fails_fails_its_conversation(answer: Answer, asked: int, message: str) -> None:
    endpoint = {"retries": 1, "timeout": 0.5 if answer.seconds else 60}
    trajectory, server = served("a", answer=lambda *_: answer, endpoint=endpoint)
    assert message in failure(trajectory)
    assert len(server.asked) == asked


def test_an_endpoint_that_fails_one_conversation_leaves_the_others_alone() -> None:
    lock, numbers = threading.Lock(), iter(range(9))

    def answer(question: Any, number: int) -> Answer:
        with lock:
            broken = next(numbers) == 0
        return Answer({"detail": "bad"}, status=400) if broken else says(*["[DONE]"] * 9)(question, number)

    with serving(answer) as server:
        endpoint = {"url": server.url, "model": "m", "retries": 0}
        trajectories = hold_all(Says("a"), lambda: ModelledUser(endpoint=endpoint, system_prompt="s"), size=4)
    assert sorted(str(one.stop) for one in trajectories) == ["done", "done", "done", "error"]


def test_an_endpoint_that_is_not_there_is_reported() -> None:
    with serving(says()) as server:
        url = server.url
    endpoint = {"url": url, "model": "m", "retries": 0}
    trajectory = hold(Says("a"), lambda: ModelledUser(endpoint=endpoint, system_prompt="s"))
    assert f"the service {url}/chat/completions was called once: " in failure(trajectory)
    assert "refused" in failure(trajectory).lower()


def test_many_conversations_are_answered_together() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    def slow(question: Any, number: int) -> Answer:
        gate.wait()
        return Answer({"choices": [{"message": {"content": "[DONE]"}}]})

    with serving(slow) as server:
        endpoint = {"url": server.url, "model": "m"}
        trajectories = hold_all(Says("a"), lambda: ModelledUser(endpoint=endpoint, system_prompt="s"), size=8)
    assert [one.stop for one in trajectories] == ["done"] * 8


# engines and functions


def test_an_engine_gives_the_user_a_voice() -> None:
    engine = scripted(["Size 40."], ["Thanks. [DONE]"])
    chat_model = EngineChatModel(engine, RENDERER, Sampling(temperature=0.5))
    trajectory = hold(
        Says("Which size?", "Here."), lambda: ModelledUser(chat_model=chat_model, system_prompt="You buy shoes.")
    )
    assert contents(trajectory.messages) == [
        "user: Hi", "assistant: Which size?", "user: Size 40.", "assistant: Here.", "user: Thanks."
    ]  # fmt: skip


def test_an_engine_is_asked_with_the_whole_conversation_and_forgets_it() -> None:
    engine = Says("Fine.")
    chat_model = EngineChatModel(engine, RENDERER, Sampling(max_tokens=7, top_k=3), seed=5)
    messages: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert asyncio.run(chat_model(messages)) == "Fine."
    (request,) = engine.requests
    assert RENDERER.decode(request.token_ids) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (request.seed, request.sampling.max_tokens, request.sampling.top_k) == (5, 7, 3)
    assert engine.released == ["user/5"]


def test_an_engine_that_breaks_fails_the_conversation_and_is_released() -> None:
    engine = Says(RuntimeError("out of memory"))
    chat_model = EngineChatModel(engine, RENDERER)
    trajectory = hold(Says("a"), lambda: ModelledUser(chat_model=chat_model, system_prompt="s"))
    assert (failure(trajectory), engine.released) == ("RuntimeError: out of memory", ["user/0"])


def test_a_function_gives_the_user_a_voice_beside_the_event_loop() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    def user(messages: list[Message]) -> str:
        gate.wait()
        return f"You said {messages[-1]['content']} [DONE]"

    trajectories = hold_all(Says("a"), lambda: ModelledUser(chat_model=user, system_prompt="s"), size=8)
    assert [one.messages[-1]["content"] for one in trajectories] == ["You said a"] * 8


@pytest.mark.parametrize(
    ("answer", "timeout", "message"),
    [
        (lambda: time.sleep(2), 0.05, "the modelled user did not answer within 0.05 s"),
        (lambda: 5, 60, "TypeError: the chat_model of the modelled user returned 5; it must return a text"),
        (lambda: 1 // 0, 60, "ZeroDivisionError"),
        (lambda: "  ", 60, "the modelled user returned an empty answer"),
    ],
)
def test_a_function_that_fails_fails_the_conversation(answer: Callable[[], Any], timeout: float, message: str) -> None:
    trajectory = hold(
        Says("a"), lambda: ModelledUser(chat_model=lambda _: answer(), system_prompt="s", timeout=timeout)
    )
    assert message in failure(trajectory)


def test_a_conversation_that_the_user_ends_before_it_begins_fails() -> None:
    row = Row(id="1", messages=[{"role": "system", "content": "Sell."}])
    trajectory = hold(Says("a"), lambda: ModelledUser(chat_model=lambda _: "[DONE]", system_prompt="s"), row=row)
    assert failure(trajectory) == "the modelled user ended the conversation of row '1' without writing a message"


def test_tools_stand_in_front_of_a_modelled_user_who_hears_none_of_them() -> None:
    heard: list[list[Message]] = []

    def user(messages: list[Message]) -> str:
        heard.append(messages)
        return "[DONE]"

    engine = Says(call("calculator", '{"expression": "1+1"}'), "It is 2.")
    trajectory = hold(engine, lambda: Tools([calculator], then=ModelledUser(chat_model=user, system_prompt="s")))
    assert [contents(messages)[2:] for messages in heard] == [["assistant: Hi", "user: It is 2."]]
    assert trajectory.stop == "done"


def test_images_are_not_for_the_user() -> None:
    heard: list[list[Message]] = []
    content = [{"type": "image", "image": object()}, {"type": "text", "text": "Look!"}]
    user = ModelledUser(chat_model=lambda messages: heard.append(messages) or "", system_prompt="s")
    row = Row(id="1", messages=[{"role": "user", "content": content}, {"role": "assistant", "content": "Nice."}])
    with pytest.raises(ServiceError, match="an empty answer"):
        asyncio.run(user.begin(row))
    assert contents(heard[0])[1:] == ["user: Hello! What can I do for you?", "assistant: Look!", "user: Nice."]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs either endpoint or chat_model"),
        ({"endpoint": {"url": "http://h", "model": "m"}, "chat_model": str, "system_prompt": "s"},
         "needs either endpoint or chat_model"),
        ({"chat_model": str}, "needs a system prompt: set system_prompt, system_prompt_column or both"),
        ({"chat_model": 5, "system_prompt": "s"}, "chat_model is a int, 5; it must be a function of messages"),
        ({"chat_model": "json:no", "system_prompt": "s"}, "environment.arguments.chat_model: json has no 'no'"),
        (
            {"chat_model": str, "system_prompt": "s", "max_user_turns": 0},
            "max_user_turns=0 is not allowed; it must be at least 1",
        ),
        ({"chat_model": str, "system_prompt": "s", "stop_phrase": " "}, "stop_phrase=' ' occurs in all texts"),
        ({"chat_model": str, "system_prompt": "s", "timeout": 0}, "timeout=0 has no effect: give a number above 0"),
        ({"endpoint": {"url": "http://h", "model": "m"}, "system_prompt": "s", "timeout": 5}, "set endpoint.timeout"),
        ({"endpoint": {"url": "h", "model": "m"}, "system_prompt": "s"}, "is not the address of a service"),
        ({"endpoint": {"url": "http://h"}, "system_prompt": "s"}, "missing a required argument: 'model'"),
        ({"endpoint": {"url": "http://h", "model": "m", "key": "x"}, "system_prompt": "s"}, "unexpected keyword argument 'key'"),
        ({"endpoint": {"url": "http://h", "model": "m", "request": {"n": 2}}, "system_prompt": "s"}, "endpoint.request has 'n'"),
        ({"endpoint": {"url": "http://h", "model": "m", "api_key_env": "NO_KEY"}, "system_prompt": "s"}, "NO_KEY is not set"),
        ({"endpoint": {"url": "http://h", "model": "m", "retries": -1}, "system_prompt": "s"}, "retries=-1"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_at_the_start(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelledUser(**options)
    assert message in str(error.value)


def test_an_address_may_be_whole() -> None:
    with serving(says("Hi.")) as server:
        assert asyncio.run(Endpoint(f"{server.url}/openai/chat/completions", "m")([GREETING])) == "Hi."
    assert server.paths == ["/openai/chat/completions"]


def test_a_recipe_names_the_speaker(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("async def user(messages):\n    return messages[0]['content'] + ' [DONE]'\n")
    use = {
        "use": "turnwise.environments.users:ModelledUser",
        "arguments": {"chat_model": f"{file}:user", "system_prompt": "I am your user."},
    }
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, "environment": use})
    trajectory = hold(Says("a"), assembly.environment_factory(config))
    assert trajectory.messages[-1]["content"] == "I am your user."


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("speaker", "chat_model"),
        ("system", "system_prompt"),
        ("system_column", "system_prompt_column"),
        ("stop", "stop_phrase"),
        ("exchanges", "max_user_turns"),
    ],
)
def test_an_old_argument_name_is_answered_with_the_new_name(old: str, new: str) -> None:
    use = Use(use="turnwise.environments.users:ModelledUser", arguments={old: None})
    with pytest.raises(ConfigError, match=f"unexpected keyword argument '{old}'; {old} is called {new} here$"):
        named_callable(use, key="environment")
