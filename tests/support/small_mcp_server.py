"""A server over stdio that speaks MCP without the SDK: it starts in a twentieth of the time of `mcp_server.py`, for tests of how
many servers there are and when they end, to which it does not matter who wrote the server's messages."""

import json
import os
import sys
from typing import Any

HEARD: list[str] = []
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""
TOOLS: dict[str, dict[str, str]] = {
    "add": {"a": "integer", "b": "integer"},
    "remember": {"word": "string"},
    **{name: {} for name in ("image", "fail", "crash", "die", "pid")},
}
"""The parameters of each tool, with their types."""


def text(words: object, *, error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(words)}], "isError": error}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "add":
            return text(int(str(arguments["a"])) + int(str(arguments.get("b", 1))))
        case "remember":
            HEARD.append(str(arguments["word"]))
            return text(f"{os.getpid()} {' '.join(HEARD)}")
        case "image":
            picture = {"type": "image", "data": PICTURE, "mimeType": "image/png"}
            return {"content": [{"type": "text", "text": "here"}, picture]}
        case "fail":
            return text("the pump is broken", error=True)
        case "crash":  # as the official SDK answers for a tool that raises no ToolError
            print("ValueError: the pump is dry", file=sys.stderr, flush=True)
            return text("Error executing tool crash", error=True)
        case "die":
            os._exit(3)
        case _:
            return text(os.getpid())


def answer(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None if there is no such method."""
    params = asked.get("params") or {}
    match asked["method"]:
        case "initialize":
            about = {"capabilities": {"tools": {}, "prompts": {}}, "serverInfo": {"name": "small", "version": "1"}}
            return {"protocolVersion": params["protocolVersion"], **about}
        case "tools/list":
            shown = []
            for name, types in TOOLS.items():
                properties = {key: {"type": type, "title": key.title()} for key, type in types.items()}
                schema = {"type": "object", "properties": properties, "required": list(types)[:1]}
                shown.append({"name": name, "description": "A tool.", "inputSchema": schema})
            return {"tools": shown}
        case "tools/call":
            return called(params["name"], params.get("arguments") or {})
        case "prompts/list":
            return {"prompts": []}
        case _:
            return None


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue  # a notification
        result = answer(message)
        error = {"error": {"code": -32601, "message": "there is no such method"}}
        print(
            json.dumps({"jsonrpc": "2.0", "id": message["id"], **({"result": result} if result else error)}), flush=True
        )
