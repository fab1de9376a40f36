"""The user of `modelled_user.yaml`, a model on the embedded engine, and the reward of the conversation."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from turnwise import Message, Sampling, Trajectory
from turnwise.data.numeric_answers import final_answer, same_number
from turnwise.rollout.chat_model import EngineChatModel


@cache
def chat_model() -> Future[EngineChatModel]:
    """The user's model, loaded once, at its first use, in a thread: loading must not block the event loop."""
    return ThreadPoolExecutor(1).submit(_load)


def _load() -> EngineChatModel:
    from transformers import AutoModelForCausalLM

    from turnwise.chat.renderer import Renderer
    from turnwise.engines.local import LocalEngine

    path = os.environ.get("USER_MODEL", "demo/model")
    renderer = Renderer.from_pretrained(path)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(path).eval(), decode=renderer.decode)
    return EngineChatModel(engine, renderer, Sampling(max_tokens=48))


async def user(messages: list[Message]) -> str:
    """The user's answer. An empty answer ends the conversation."""
    model = await asyncio.wrap_future(chat_model())
    return await model(messages) or "[DONE]"


def right(trajectory: Trajectory) -> float:
    """1 if the model's last answer is right, else 0."""
    return float(same_number(final_answer(trajectory.answer), str(trajectory.row["answer"])))
