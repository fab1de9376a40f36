"""Descriptions of tools as text of a system message, for models whose template does not show tools.

Each format has the text with which its models were trained, where there is such a text. The others list the schemas, and show a
call. `undescribed` finds tools that a prompt does not show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import ToolFormat
from turnwise.types import ToolSchema


def describe_tools(format: ToolFormat, tools: Sequence[ToolSchema]) -> str:
    """The text that describes `tools` to a model that writes calls in `format`.

    Example: for `hermes` the text of Qwen2.5 and Qwen3, with one schema a line between `<tools>` and `</tools>`.
    """
    return _TEXTS.get(format.name, _with_example(format))(tools)


def undescribed(tools: Sequence[ToolSchema], prompt: str) -> list[str]:
    """What of the tools is not in a prompt: names of tools, and parameters as `tool.parameter`."""
    missing: list[str] = []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        name, parameters = str(function.get("name", "")), function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if name not in prompt:
            missing.append(name)
        elif isinstance(properties, Mapping):
            missing += [f"{name}.{parameter}" for parameter in properties if str(parameter) not in prompt]
    return missing


def _json(value: Any, *, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _lines(tools: Sequence[ToolSchema]) -> str:
    """One schema a line, between the tags in which most models know them."""
    return "\n".join(["<tools>", *(_json(tool) for tool in tools), "</tools>"])


def _hermes(tools: Sequence[ToolSchema]) -> str:
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n{_lines(tools)}\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _qwen3_coder(tools: Sequence[ToolSchema]) -> str:
    return (
        f"# Tools\n\nYou have access to the following functions:\n\n{_lines(tools)}\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>"
    )


def _glm(tools: Sequence[ToolSchema]) -> str:
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n{_lines(tools)}\n\n"
        "For each function call, output the function name and arguments within the following XML format:\n"
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
    )


def _llama3(tools: Sequence[ToolSchema]) -> str:
    return (
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        "Do not use variables.\n\n" + "\n\n".join(_json(tool, indent=4) for tool in tools)
    )


def _pythonic(tools: Sequence[ToolSchema]) -> str:
    return (
        "You have access to the following functions. If you decide to invoke any of the functions, put the calls in the "
        "format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]. "
        "Do not include any other text in the response.\n\n"
        f"Here is a list of functions in JSON format that you can invoke.\n\n{_json(tools, indent=4)}"
    )


def _mistral(tools: Sequence[ToolSchema]) -> str:
    return f"[AVAILABLE_TOOLS]{_json(tools)}[/AVAILABLE_TOOLS]"


def _lfm2(tools: Sequence[ToolSchema]) -> str:
    return f"List of tools: <|tool_list_start|>{_json(tools)}<|tool_list_end|>"


def _with_example(format: ToolFormat) -> Callable[[Sequence[ToolSchema]], str]:
    def text(tools: Sequence[ToolSchema]) -> str:
        return (
            f"# Tools\n\nYou may call the following functions. Their signatures are within <tools></tools> XML tags:\n"
            f"{_lines(tools)}\n\nWrite each call in this form:\n{format.example}"
        )

    return text


_TEXTS: Mapping[str, Callable[[Sequence[ToolSchema]], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm": _glm,
    "llama3": _llama3,
    "pythonic": _pythonic,
    "mistral": _mistral,
    "lfm2": _lfm2,
}
"""The texts by the name of the format."""
