"""verl's search helper (`verl.tools.utils.search_r1_like_utils`): returns documents as JSON text, and the request's metadata."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from turnwise.environments.search import Search
from turnwise.errors import TurnwiseError

__all__ = ["perform_single_search_batch"]


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: Sequence[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: float = 30,
) -> tuple[str, dict[str, Any]]:
    """Send queries to a retrieval service and wait. Returns `{"result": text}` as JSON, and the request's metadata.

    If the service does not answer, both contain the error, and nothing is raised. `concurrent_semaphore` is held during the
    request.
    """
    search = Search(retrieval_service_url, topk=topk, timeout=float(timeout))
    problem, text = None, ""
    with concurrent_semaphore or contextlib.nullcontext():
        try:
            text = asyncio.run(search.search(list(query_list)))
        except (TurnwiseError, ValueError) as error:
            problem = str(error)
    num_results = text.count("(Title: ")
    metadata = {
        "query_count": len(query_list),
        "queries": list(query_list),
        "api_request_error": problem,
        "status": "api_error" if problem else "success" if num_results else "no_results",
        "total_results": num_results,
        "formatted_result": None if problem else text,
    }
    return json.dumps({"result": f"Search error: {problem}" if problem else text}, ensure_ascii=False), metadata
