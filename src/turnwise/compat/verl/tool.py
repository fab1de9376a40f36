"""verl's tools in turnwise's tool layer: one object serves all conversations, with one instance per conversation.

`create` is called when the conversation begins, `execute` for each call, `calc_reward` once after the conversation, and
`release` exactly once, however the conversation ends. Schemas, checks of arguments, time limits and error messages for the
model are the same as for other tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.compat.verl.agent_data import AgentData
from turnwise.compat.verl.calls import ConversationResource, call, takes
from turnwise.compat.verl.rows import Wanted
from turnwise.compat.verl.schemas import ToolResponse, read_response
from turnwise.environments.tools import result as tool_result
from turnwise.environments.tools.tool import Tool
from turnwise.errors import boundary
from turnwise.user_code.reward_number import reward_number

__all__ = ["ToolInstance", "VerlTool"]


@dataclass(frozen=True, slots=True)
class VerlTool:
    """A user's tool object, and its description for the model."""

    instance: Any
    """The object with `create`, `execute`, `calc_reward` and `release`."""
    tool: Tool
    """The schema and the limits of the tool; each conversation sets the function."""

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return self.tool.name


@dataclass(slots=True)
class ToolInstance:
    """The instance of a tool in one conversation."""

    of: VerlTool
    id: str
    wanted: Wanted
    agent_data: AgentData
    """The state of the conversation, which `execute` receives in verl v0.7."""
    response: ToolResponse = field(default_factory=ToolResponse)
    """The response that `create` returned."""
    _lease: ConversationResource[str] = field(init=False)

    def __post_init__(self) -> None:
        self._lease = ConversationResource(self._create, self._release, f"the tool {self.of.name!r}")

    async def create(self) -> None:
        """Call `create`. Raises Failed."""
        self.id = await self._lease.acquire()

    @property
    def tool(self) -> Tool:
        """The tool with this conversation's function."""
        return replace(self.of.tool, function=self._execute)

    async def calc_reward(self) -> float:
        """The reward of the conversation's calls; a list of numbers is summed. Raises Failed.

        A list of texts counts as 0: `calc_reward` of verl's own service tools returns their responses.
        """
        reward = await self._call(self.of.instance.calc_reward, "calc_reward")
        with boundary("environment"):
            if isinstance(reward, list | tuple):
                return 0.0 if any(isinstance(item, str) for item in reward) else float(sum(reward))
            return 0.0 if reward is None else reward_number(reward, f"{self.of.name}.calc_reward")

    async def release(self) -> None:
        """Call `release`. Raises Failed."""
        await self._lease.release()

    async def _create(self) -> str:
        method = self.of.instance.create
        keywords = dict(self.wanted.keywords(self.of.name, "create_kwargs"))
        # verl up to v0.6 passes separate keywords, later versions one keyword `create_kwargs`: both are supported
        as_mapping = {"create_kwargs": keywords} if takes(method, "create_kwargs", anything=True) else {}
        if as_mapping and not all(takes(method, name, anything=True) for name in keywords):
            keywords = {}
        created = await self._call(method, "create", {**keywords, **as_mapping})
        with boundary("environment"):
            if isinstance(created, tuple):
                name, returned = created if len(created) == 2 else (None, created)
                response = ToolResponse() if returned is None else read_response(returned)
                if response is None:
                    raise TypeError(
                        f"{type(self.of.instance).__name__}.create returned {created!r:.80}; it must return the "
                        f"instance_id, or (instance_id, ToolResponse)"
                    )
                created, self.response = name, response
            return str(created) if created is not None else self.id

    async def _execute(self, arguments: dict[str, Any]) -> Any:
        method = self.of.instance.execute
        keywords = dict(self.wanted.keywords(self.of.name, "execute_kwargs"))
        if takes(method, "agent_data", anything=True):  # passed since v0.7
            keywords.setdefault("agent_data", self.agent_data)
        name = f"{self.of.name}.execute"
        result = await call(method, self.id, arguments, keywords=keywords, name=name, kind="tool")
        answer, reward, info = _read(result, type(self.of.instance).__name__, self.of.name)
        if reward is not None:
            self.agent_data.tool_rewards.append(reward)
        return answer, reward, info

    async def _release(self, name: str) -> None:
        await self._call(self.of.instance.release, "release")

    async def _call(self, method: Callable[..., Any], name: str, keywords: Mapping[str, Any] | None = None) -> Any:
        if keywords is None:
            keywords = self.wanted.keywords(self.of.name, f"{name}_kwargs")
        return await call(method, self.id, keywords=keywords, name=f"{self.of.name}.{name}", kind="environment")


def _read(result: Any, kind: str, name: str) -> tuple[Any, float | None, dict[str, Any]]:
    """The result of `execute` as (answer, reward, info)."""
    reward: Any = 0.0
    info: Any = {}
    if isinstance(result, tuple):
        if not 1 <= len(result) <= 3:
            raise TypeError(f"{kind}.execute returned {len(result)} values; it must return (response, reward, metrics)")
        result, reward, info = (*result, *(0.0, {})[len(result) - 1 :])
    if (response := read_response(result)) is not None:
        answer: Any = tool_result.ToolResponse(response.text, response.image or None, response.video or None)
    elif isinstance(result, bytes | bytearray):
        answer = bytes(result).decode("utf-8", errors="replace")
    elif result is None:
        raise TypeError(f"{kind}.execute returned nothing; it must return (response, reward, metrics)")
    else:
        answer = result if isinstance(result, str | dict) else {"result": result}
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{kind}.execute returned the metrics {info!r:.80}; they must be a mapping")
    return (
        answer,
        (None if reward is None else reward_number(reward, f"{kind}.execute")),
        ({name: dict(info)} if info else {}),
    )
