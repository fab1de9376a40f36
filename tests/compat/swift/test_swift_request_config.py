"""A `request_config` that a scheduler changes: how many tokens a turn has, and which texts end it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from support.conversations import Says, spoken
from support.swift import play, whole
from turnwise.compat.swift.protocol import RequestConfig
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.types import Stop


def config(**values: Any) -> RequestConfig:
    return RequestConfig(logprobs=True, **values)


class Steps(MultiTurnScheduler):
    """Returns a changed request_config after the first turn, and none after the second."""

    changed: ClassVar[dict[str, Any]] = {}

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "More."})
        returned = {"request_config": config(**type(self).changed)} if current_turn == 1 else {}
        return {"infer_request": infer_request, **returned}


class CallsRun(Steps):
    """The same, through the `run` that it overrides."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
        return await super().run(infer_request, request_config, **kwargs)


@pytest.mark.parametrize("base", [Steps, CallsRun])
def test_what_step_returns_holds_for_the_following_turns(base: type[Steps]) -> None:
    engine = Says("first", "more", "abcdefgh")
    trajectory = play(type("Short", (base,), {"changed": {"max_tokens": 6, "stop": ["!"]}}), engine, max_turns=3)
    assert whole(trajectory).stop in (Stop.LENGTH, Stop.DONE)
    assert [text for turn, text in spoken(trajectory.segments[0]) if turn >= 0] == [
        "first<|im_end|>",
        "more<|im_end|>",
        "abcdef",
    ]
    assert [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests] == [
        (400, ()),
        (6, ("!",)),
        (6, ("!",)),
    ]


def test_each_question_of_a_run_has_the_request_config_that_it_is_asked_with() -> None:
    class Asks(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            request_config.max_tokens, request_config.stop = 7, ["."]
            first = await self.infer_engine.infer_async(infer_request, request_config)
            for following in (config(max_tokens=3), config()):
                infer_request.messages += [
                    {"role": "assistant", "content": first.choices[0].message.content},
                    {"role": "user", "content": "More."},
                ]
                first = await self.infer_engine.infer_async(infer_request, following)
            raise AssertionError("the second answer was cut")

    engine = Says("first", "second")
    trajectory = play(Asks, engine)
    assert [(one.sampling.max_tokens, one.sampling.stop) for one in engine.requests] == [(7, (".",)), (3, ())]
    assert [turn.text for turn in trajectory.turns] == ["first", "sec"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"temperature": 0.5},
            "temperature=0.5. Training needs all tokens to be sampled from the recipe's distribution",
        ),
        ({"temperature": 0.5}, "set sampling.temperature in the recipe"),
        ({"top_p": 0.9}, "set sampling.top_p in the recipe"),
        ({"top_k": 4}, "set sampling.top_k in the recipe"),
        ({"min_p": 0.1}, "set sampling.min_p in the recipe"),
        (
            {"repetition_penalty": 1.2},
            "repetition_penalty in the request_config; the recipe has no such option",
        ),
        ({"max_tokens": 0}, "SamplingChange(max_tokens=0): max_tokens must be an integer of at least 1"),
    ],
)
@pytest.mark.parametrize("base", [Steps, CallsRun])
def test_a_change_of_the_distribution_breaks_its_conversation_and_says_what_to_set(
    base: type[Steps], changed: dict[str, Any], why: str
) -> None:
    error = play(type("Other", (base,), {"changed": changed}), "one", "two", max_turns=2).error
    assert error is not None
    assert error.kind == "environment"
    assert why in error.message


def test_what_is_no_request_config_is_refused() -> None:
    class Dictionary(Steps):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            return {**super().step(infer_request, response_choice, current_turn), "request_config": {"max_tokens": 3}}

    error = play(Dictionary, "one", "two", max_turns=2).error
    assert error is not None
    assert "request_config must be a RequestConfig; it is {'max_tokens': 3}" in error.message
