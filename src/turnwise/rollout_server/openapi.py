"""The OpenAPI description of the rollout server, and a page that shows it."""

from __future__ import annotations

import html
from typing import Any

from pydantic import BaseModel

from turnwise.rollout_server.wire import LeaseBody, LeaseIdBody, RolloutBody, WeightsPathBody
from turnwise.version import __version__

__all__ = ["document", "page"]

_TRAJECTORIES = (
    "Server-sent events. Each event is a JSON object with a finished trajectory (`trajectory`, in the format of docs/record.md) "
    "and the completions of its turns (`completions`). Comments are heartbeats. The last event is `data: [DONE]`; without it "
    "the stream is incomplete."
)
_NO_LEASE = "The lease is missing, or another trainer has taken it."
_BUSY = "The queue is full: try again after the seconds in the header Retry-After."


def document() -> dict[str, Any]:
    """The description, as JSON values (OpenAPI 3.1)."""
    schemas: dict[str, Any] = {}
    for kind in (RolloutBody, LeaseBody, LeaseIdBody, WeightsPathBody):
        schemas |= _schemas(kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "turnwise rollout server",
            "version": __version__,
            "description": "Runs conversations near an engine, and receives the weights of a trainer. Errors have the form "
            '`{"error": "<value, rule and fix>"}`.',
        },
        "security": [{"token": []}],
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/health": {"get": {**_operation("Whether the server answers; needs no token."), "security": []}},
            "/info": {"get": _operation("The model, the version of its weights, and the options of the recipe.")},
            "/metrics": {"get": _operation("Metrics in the text format of Prometheus.", content="text/plain")},
            "/rollouts": {
                "post": {
                    **_operation(
                        "Run conversations and stream the trajectories as they finish.",
                        content="text/event-stream",
                        answer=_TRAJECTORIES,
                        body=RolloutBody,
                        refusals={"409": "The weights are older than `least_version`.", "503": _BUSY},
                    )
                }
            },
            "/lease": {
                "post": _operation(
                    "Become the trainer that may change the weights.",
                    body=LeaseBody,
                    refusals={"409": "Another trainer uses the server."},
                ),
            },
            "/lease/renew": {"post": _operation("Keep the lease.", body=LeaseIdBody, refusals={"409": _NO_LEASE})},
            "/lease/release": {
                "post": _operation("Give the lease back.", body=LeaseIdBody, refusals={"409": _NO_LEASE})
            },
            "/weights": {"post": _weights()},
        },
    }


def _weights() -> dict[str, Any]:
    operation = _operation(
        "Load weights: a safetensors file as the body, or the path of a file that the server can read.",
        body=WeightsPathBody,
        refusals={
            "409": _NO_LEASE,
            "413": "The body is larger than the model.",
            "422": "The weights cannot be loaded; the old weights stay.",
        },
    )
    operation["requestBody"]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    parameters = [
        {
            "name": name,
            "in": "query",
            "schema": {"type": kind},
            "description": f"{text}, if the body is a safetensors file.",
        }
        for name, kind, text in (
            ("version", "integer", "The version of the weights"),
            ("lease", "string", "The trainer's lease, from POST /lease"),
            ("checksum", "string", "CRC-32 of the file as 8 hexadecimal digits (optional)"),
        )
    ]
    return {**operation, "parameters": parameters}


def _operation(
    summary: str,
    *,
    content: str = "application/json",
    answer: str = "Done.",
    body: type[BaseModel] | None = None,
    refusals: dict[str, str] | None = None,
) -> dict[str, Any]:
    schema = {"type": "object"} if content == "application/json" else {"type": "string"}
    responses: dict[str, Any] = {"200": {"description": answer, "content": {content: {"schema": schema}}}}
    refusals = {"401": "The bearer token is missing or wrong.", **(refusals or {})}
    if body is not None:
        refusals["400"] = "The body is not as described."
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    for status, reason in sorted(refusals.items()):
        responses[status] = {"description": reason, "content": {"application/json": {"schema": error}}}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation


def _schemas(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), kind.__name__: schema}


def page() -> str:
    """The description as an HTML page without scripts."""
    described = document()
    rows = [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{html.escape(operation['summary'])}</td>"
        f"<td>{_statuses(operation)}</td></tr>"
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    bodies = [
        f"<h3>{html.escape(name)}</h3><p>{html.escape(schema.get('description', ''))}</p><ul>{_fields(schema)}</ul>"
        for name, schema in described["components"]["schemas"].items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>turnwise rollout server</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}td{border-top:1px solid #ccc;padding:.4em;"
        "vertical-align:top}</style>"
        f"<h1>turnwise rollout server</h1><p>{html.escape(described['info']['description'])} The same as JSON: "
        '<a href="/openapi.json">/openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table><h2>Bodies</h2>{''.join(bodies)}</html>"
    )


def _statuses(operation: dict[str, Any]) -> str:
    return "<br>".join(
        f"{status}: {html.escape(response['description'])}" for status, response in operation["responses"].items()
    )


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    return "".join(
        f"<li><code>{html.escape(name)}</code>{' (required)' if name in required else ''}: "
        f"{html.escape(field.get('description', ''))}</li>"
        for name, field in schema.get("properties", {}).items()
    )
