"""verl's tools that ask a service, and subclasses of them as users write them, against real servers on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compat.verl.verl_files import schema, set_up
from support.conversations import call, hold
from support.servers import Answer, serving
from turnwise.compat.verl import verl_names

SUBCLASSES = '''
from verl.tools.sandbox_fusion_tools import PoolMode, SandboxFusionTool, init_execution_pool
from verl.tools.schemas import ToolResponse
from verl.tools.search_tool import SearchTool


class Printing(SandboxFusionTool):
    """Prints the last line, as a recipe of verl's does, and runs the program in the pool itself."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.own = config["own"]

    async def execute(self, instance_id, parameters, **kwargs):
        code = f"print({parameters['code']})"
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        self._instance_dict[instance_id]["reward"].append(result.text)
        return result, None, None

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self._instance_dict[instance_id]["reward"])) + self.own


class Filtered(SearchTool):
    def execute_search(self, instance_id, query_list, retrieval_service_url, topk, timeout):
        text, metadata = super().execute_search(instance_id, query_list, retrieval_service_url, topk, timeout)
        return text.replace("Bern", "BERN"), {**metadata, "status": "filtered"}


class Pooled(SearchTool):
    """Makes a pool of its own for a sync function."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.pool = init_execution_pool(2, enable_global_rate_limit=False, mode=PoolMode.ThreadMode)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=await self.pool.execute.remote(self.blocking, parameters["query_list"])), 0.0, {}

    def blocking(self, queries):
        if not queries:
            raise ValueError("no query")
        return f"{queries[0]} at {self.topk} of {self.retrieval_service_url.partition(':')[0]} in {self.timeout}"
'''

FOUND = {"result": [[{"document": {"contents": "Bern\nIn Switzerland."}, "score": 1.0}]]}
RAN = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "3\n", "stderr": ""}}


def entry(kind: str, name: str, parameter: str, type_: str, **config: Any) -> dict[str, Any]:
    tool = schema(name, **{parameter: type_})
    if type_ == "array":
        tool["function"]["parameters"]["properties"][parameter]["items"] = {"type": "string"}
    return {"class_name": kind, "config": {"type": "native", **config}, "tool_schema": tool}


def answered(folder: Path, tool: dict[str, Any], arguments: Any, answer: Any, url: str, **more: Any) -> Any:
    """A conversation with one call, and what the service was asked."""
    (folder / "own.py").write_text(SUBCLASSES)
    with serving(lambda question, number: Answer(answer, **more)) as server:
        tool["config"][url] = server.url
        made = set_up(folder, tools=[tool])
        one = hold([call(tool["tool_schema"]["function"]["name"], json.dumps(arguments)), "done"], made)
    (said,) = [message["content"] for message in one.messages if message["role"] == "tool"]
    return one, said, server


def test_a_search_result_is_formatted_as_in_verl(tmp_path: Path) -> None:
    tool = entry("verl.tools.search_tool.SearchTool", "search", "query_list", "array", topk=1)
    one, said, server = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert json.loads(said) == {"result": "Doc 1 (Title: Bern)\nIn Switzerland."}
    assert server.asked == [{"queries": ["bern"], "topk": 1, "return_scores": True}]
    metrics = {"query_count": 1, "status": "success", "total_results": 1, "api_request_error": None}
    assert one.turns[0].info == {"search": metrics}
    assert one.turns[1].info == {"calc_reward": {"search": 0.0}}


def test_a_subclass_may_override_the_search(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Filtered", "search", "query_list", "array")
    one, said, _ = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert json.loads(said) == {"result": "Doc 1 (Title: BERN)\nIn Switzerland."}
    assert one.turns[0].info["search"]["status"] == "filtered"


def test_a_service_that_refuses_is_an_error_of_the_call(tmp_path: Path) -> None:
    tool = entry("verl.tools.search_tool.SearchTool", "search", "query_list", "array")
    one, said, _ = answered(tmp_path, tool, {"query_list": ["a"]}, "no", "retrieval_service_url", status=404)
    assert "returned the status 404" in said
    assert [outcome.error for outcome in one.turns[0].outcomes] == ["raised"]
    one, said, _ = answered(tmp_path, tool, {"query_list": []}, FOUND, "retrieval_service_url")
    assert said == "Error: query_list must be a list of texts; it is []"


def test_a_subclass_has_the_attributes_and_the_pool_of_verl_s(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Pooled", "search", "query_list", "array", timeout=7)
    _, said, _ = answered(tmp_path, tool, {"query_list": ["bern"]}, FOUND, "retrieval_service_url")
    assert said == "bern at 3 of http in 7"
    _, said, _ = answered(tmp_path, tool, {"query_list": []}, FOUND, "retrieval_service_url")
    assert said == "Error: no query"  # verl's pool gives None for whatever raises


def test_a_program_is_run_in_the_language_and_time_of_the_call(tmp_path: Path) -> None:
    tool = entry(
        "verl.tools.sandbox_fusion_tools.SandboxFusionTool", "code_interpreter", "code", "string", default_timeout=5
    )
    tool["tool_schema"]["function"]["parameters"]["properties"]["language"] = {"type": "string"}
    arguments = {"code": "puts 3", "language": "ruby"}
    one, said, server = answered(tmp_path, tool, arguments, RAN, "sandbox_fusion_url")
    assert said == "3"
    (asked,) = server.asked
    assert {name: asked[name] for name in ("code", "language", "run_timeout", "memory_limit_MB")} == {
        "code": "puts 3",
        "language": "ruby",
        "run_timeout": 5.0,
        "memory_limit_MB": 1024,
    }
    assert one.turns[0].reward == 0.0


def test_a_subclass_of_the_sandbox_runs_programs_in_the_pool(tmp_path: Path) -> None:
    tool = entry(f"{tmp_path}/own.py:Printing", "code_interpreter", "code", "string", own=0.5)
    one, said, server = answered(tmp_path, tool, {"code": "1 + 2"}, RAN, "sandbox_fusion_url")
    assert (said, server.asked[0]["code"], server.asked[0]["language"]) == ("3", "print(1 + 2)", "python")
    assert one.turns[-1].reward == 1.0 + 0.5


def test_the_search_helper_tells_of_a_service_that_is_not_there() -> None:
    with verl_names():
        from verl.tools.utils.search_r1_like_utils import perform_single_search_batch  # type: ignore[import-not-found]
    with serving(lambda question, number: Answer("no", status=400)) as server:
        text, metadata = perform_single_search_batch(server.url, ["a", "b"], topk=1, timeout=2)
    assert json.loads(text)["result"].startswith("Search error: the service")
    assert (metadata["status"], metadata["query_count"], metadata["total_results"]) == ("api_error", 2, 0)
    with serving(lambda question, number: Answer({"result": [[]]})) as server:
        text, metadata = perform_single_search_batch(server.url, ["a"])
    assert (json.loads(text), metadata["status"]) == ({"result": "No documents were found."}, "no_results")


def test_a_pool_has_threads_only() -> None:
    with verl_names():
        from verl.tools.sandbox_fusion_tools import PoolMode, init_execution_pool  # type: ignore[import-not-found]
    with pytest.raises(NotImplementedError, match=r"mode=PoolMode\.ThreadMode"):
        init_execution_pool(1, mode=PoolMode.ProcessMode)
