"""A real agent library, unchanged: `openai-agents`, with the Responses API and with chat completions."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from test_agent_clients import led, relations

from support.conversations import Says, a_row, call, spoken


@pytest.mark.parametrize("api", ["responses", "chat completions"])
def test_an_agent_of_openai_agents_with_a_tool(api: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    results: list[Any] = []

    async def agent(row: Any, base_url: str, api_key: str) -> float:
        agents.set_tracing_disabled(True)

        @agents.function_tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model_of = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
            adder = agents.Agent(
                name="Adder", instructions="Add.", tools=[add], model=model_of(model="m", openai_client=client)
            )
            result = await agents.Runner.run(adder, str(row.messages[0]["content"]))
        results.append(result.final_output)
        return float("5" in result.final_output)

    said = [call("add", '{"a": 2, "b": 3}'), "It is 5."]
    trajectory = led(Says(*said), agent, row=a_row("2 and 3?"))
    assert results == ["It is 5."]
    assert (trajectory.stop, trajectory.turns[1].reward, relations(trajectory)) == ("done", 1.0, (1, 0, 0))
    (segment,) = trajectory.segments
    assert [text for turn, text in spoken(segment) if turn >= 0] == [f"{text}<|im_end|>" for text in said]
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.messages[3]["content"] == "5"
    assert trajectory.template_mismatch is None
