"""What a user of verl would have: modules that import from verl, in the style of its documentation. Nothing of turnwise here."""

import asyncio
import contextvars
import os
import sys
import time
from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import gsm8k

EVENTS: list[tuple[Any, ...]] = []
SEEN: list[Any] = []


class DocumentedInteraction(BaseInteraction):
    """Document 1's GSM8K interaction, word for word."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
        }
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        # Extract last user message content
        content = ""
        for item in reversed(messages):
            if item.get("role") == "user":
                content = item.get("content", "")
                break

        # Ensure GSM8K format (#### prefix)
        if content.startswith("#### "):
            self._instance_dict[instance_id]["response"] = content
        else:
            self._instance_dict[instance_id]["response"] = "#### " + content

        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Your response is correct!", 1.0, {}
        else:
            return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}

    async def calculate_score(self, instance_id, **kwargs):
        return gsm8k.compute_score(
            self._instance_dict[instance_id]["response"],
            self._instance_dict[instance_id]["ground_truth"],
            method="flexible",
            format_score=0.0,
            score=1.0,
        )

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._instance_dict[instance_id]


class OptionalInteraction(BaseInteraction):
    """With a `ground_truth` that rows need not have, as verl's own weather interaction."""

    async def start_interaction(self, instance_id=None, ground_truth="none given", **kwargs):
        EVENTS.append(("start", ground_truth))
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "Thanks.", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        EVENTS.append(("finalize",))


class CounsellorInteraction(BaseInteraction):
    """Says so many things, writes down whatever happens to it, and breaks where its configuration says."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs) -> str:
        await self._happens("start", instance_id, kwargs)
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        await self._happens("respond", instance_id, [dict(message) for message in messages], kwargs)
        said = sum(message["role"] == "assistant" for message in messages)
        over = said >= self.config.get("over_after", 99)
        return over, f"advice {said}", 0.25, {"said": said}

    async def calculate_score(self, instance_id, **kwargs):
        await self._happens("score", instance_id)
        return 0.75

    async def finalize_interaction(self, instance_id, **kwargs):
        await self._happens("finalize", instance_id)

    async def _happens(self, what, *details):
        EVENTS.append((what, *details))
        if what == self.config.get("breaks_at"):
            raise RuntimeError(f"broken at {what}")
        if what == self.config.get("exits_at"):
            sys.exit(3)
        if what == self.config.get("hangs_at"):
            await asyncio.sleep(self.config.get("seconds", 60))


WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class RememberingInteraction(BaseInteraction):
    """Sets a context variable when it starts, and reads it later."""

    async def start_interaction(self, instance_id=None, **kwargs):
        WHO.set(kwargs["who"])
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, WHO.get(), 0.0, {}

    def finalize_interaction(self):
        EVENTS.append(("remembered", WHO.get()))


class StrictInteraction(BaseInteraction):
    """Another one, which any answer satisfies at once; sync methods, as few arguments as possible."""

    def start_interaction(self, instance_id, ground_truth):
        EVENTS.append(("strict start", ground_truth))
        return instance_id

    def generate_response(self, instance_id, messages, **kwargs):
        return True, "fine", 1.0, {}

    def finalize_interaction(self):
        EVENTS.append(("strict finalize",))


class ScorelessInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return self.config["gives"]


class LazyInteraction(BaseInteraction):
    """Imports from verl when it is called, not when it is loaded."""

    async def generate_response(self, instance_id, messages, **kwargs):
        from verl.utils.reward_score.gsm8k import compute_score

        return True, "", compute_score(messages[-1]["content"], "7"), {}


class CounterTool(BaseTool):
    """Counts up in each conversation for itself."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs) -> tuple[str, ToolResponse]:
        EVENTS.append(("create", instance_id, start, kwargs))
        if self.config.get("breaks_at") == "create":
            raise RuntimeError("broken at create")
        self._instance_dict[instance_id] = start
        return instance_id, ToolResponse(text=self.config.get("welcome"))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        SEEN.append(kwargs.pop("agent_data"))
        EVENTS.append(("execute", instance_id, parameters, kwargs))
        if self.config.get("breaks_at") == "execute":
            raise RuntimeError("broken at execute")
        self._instance_dict[instance_id] += parameters.get("by", 1)
        return (
            ToolResponse(text=str(self._instance_dict[instance_id])),
            0.125,
            {"count": self._instance_dict[instance_id]},
        )

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        EVENTS.append(("calc_reward", instance_id, kwargs))
        if self.config.get("breaks_at") == "calc_reward":
            raise RuntimeError("broken at calc_reward")
        return float(self._instance_dict[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        EVENTS.append(("release", instance_id, kwargs))
        if self.config.get("breaks_at") == "release":
            raise RuntimeError("broken at release")
        del self._instance_dict[instance_id]


class OldTool(BaseTool):
    """As they were up to v0.4: `create` gives the id alone, `execute` texts; its methods are sync."""

    def create(self, instance_id=None, **kwargs):
        return instance_id

    def execute(self, instance_id, parameters, **kwargs):
        return "plain text", 0.5, {}

    def calc_reward(self, instance_id, **kwargs):
        return 0

    def release(self, instance_id, **kwargs):
        EVENTS.append(("old release",))


class NewTool(BaseTool):
    """As they are since v0.5: `create` is handed `create_kwargs` under that name."""

    async def create(self, instance_id=None, create_kwargs=None):
        EVENTS.append(("new create", create_kwargs))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="new"), None, None


class SessionTool(BaseTool):
    """Of v0.7: an instance for each call; what lasts is in agent_data."""

    async def create(self, instance_id=None, **kwargs):
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        agent_data = kwargs["agent_data"]
        session = agent_data.extra_fields.setdefault("session", {"calls": 0})
        session["calls"] += 1
        SEEN.append(
            {
                "roles": [message["role"] for message in agent_data.messages],
                "request_id": agent_data.request_id,
                "turns": (agent_data.user_turns, agent_data.assistant_turns),
                "calls": [(call.name, call.arguments) for call in agent_data.tool_calls],
                "rewards": list(agent_data.tool_rewards),
                "scores": list(agent_data.turn_scores),
                "ids": len(agent_data.response_ids),
                "kwargs": dict(agent_data.tools_kwargs),
                "images": agent_data.image_data,
            }
        )
        agent_data.messages[0]["content"] = "changed by a tool"
        if parameters.get("what") == "tokens":
            return ToolResponse(text=str(agent_data.prompt_ids)), 0.0, {}
        return ToolResponse(text=f"call {session['calls']}"), 0.5, {}


class UnrulyTool(BaseTool):
    """Does what a tool should not do."""

    def execute(self, instance_id, parameters, **kwargs):
        what = parameters["what"]
        if what == "print":
            print("a tool prints")
            return ToolResponse(text="printed"), 0.0, {}
        if what == "exit":
            sys.exit(7)
        if what == "hang":
            time.sleep(self.config["seconds"])
            return ToolResponse(text="late"), 0.0, {}
        if what == "megabytes":
            return ToolResponse(text="x" * 10_000_000), 0.0, {}
        if what == "bytes":
            return b"caf\xc3\xa9 \xff", 0.0, {}
        if what == "nothing":
            return None
        if what == "four":
            return "a", 0.0, {}, 1
        if what == "metrics":
            return "a", 0.0, [1]
        if what == "nan":
            return "a", float("nan"), {}
        os._exit(9)


class SelfDescribedTool(BaseTool):
    """Makes its own schema, of a function: no tool_schema in the file."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "described",
                    "description": "Described by itself.",
                    "parameters": {"type": "object", "properties": {}, "required": []},
                },
            }
        )

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="ok"), 0.0, {}


class NoResponse(BaseInteraction):
    pass


class NotAnInteraction:
    def __init__(self, config):
        pass

    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id


class IdleTool(BaseTool):
    pass


class PickyInteraction(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.needed = config["needed"]

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 0.0, {}


not_a_class = 3
