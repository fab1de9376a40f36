"""The user of `modelled_user.yaml`, a model behind the embedded engine; and what the conversation is worth in the end."""

from __future__ import annotations

import os
from functools import cache

from turnwise import Message, Sampling, Trajectory
from turnwise.data.numeric_answers import final_answer, same_number
from turnwise.rollout.chat_model import EngineChatModel


@cache
def speaker() -> EngineChatModel:
    """Loaded when somebody speaks for the first time, once for all conversations."""
    from transformers import AutoModelForCausalLM

    from turnwise.chat.renderer import Renderer
    from turnwise.engines.local import LocalEngine

    path = os.environ.get("USER_MODEL", "demo/model")
    renderer = Renderer.from_pretrained(path)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(path).eval(), decode=renderer.decode)
    return EngineChatModel(engine, renderer, Sampling(max_tokens=48))


async def user(messages: list[Message]) -> str:
    """What the user says. One without a word is content."""
    return await speaker()(messages) or "[DONE]"


def right(trajectory: Trajectory) -> float:
    """1 where the model's last answer is right."""
    return float(same_number(final_answer(trajectory.answer), str(trajectory.row["answer"])))
