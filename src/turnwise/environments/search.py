"""The search tool: sends queries to a retrieval service with the protocol of Search-R1.

`POST {"queries": [...], "topk": 3, "return_scores": true}` returns `{"result": [[{"document": {"contents":
"Title\\ntext"}, "score": 1.5}, ...], ...]}`, with one list per query. `turnwise retrieval` runs such a service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.services.json_service import ServiceError, service

__all__ = ["Search"]

_MOST_QUERIES = 20


class Search:
    """A tool that finds documents.

    Args:
        retrieval_service_url: The address of the service, such as `http://127.0.0.1:8000/retrieve`.
        topk: The number of documents for each query.
        timeout: Seconds for one request.
        deadline: Seconds for a request with all its retries. The default allows all retries to time out.
        retries: Further requests if the service is unreachable, overloaded or returns a server error.
        pause: Seconds before the first retry; each further pause is longer by this time.
        max_concurrent: The maximum number of requests at the same time, over all conversations.
        token: Sent as a bearer token.
        document_chars: The maximum length of a document in the result, in characters.
    """

    def __init__(
        self,
        retrieval_service_url: str,
        *,
        topk: int = 3,
        timeout: float = 30.0,
        deadline: float | None = None,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 120,
        token: str | None = None,
        document_chars: int = 4000,
    ) -> None:
        for name, value in (("topk", topk), ("document_chars", document_chars)):
            if value < 1:
                raise ConfigError(f"Search: {name} is {value}; it must be at least 1")
        self._service = service(
            retrieval_service_url,
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            pause=pause,
            max_concurrent=max_concurrent,
            headers=(("Authorization", f"Bearer {token}"),) if token is not None else (),
        )
        self._topk = topk
        self._document_chars = document_chars

    async def search(self, query_list: list[str]) -> str:
        """Search for documents. Several queries are answered together.

        Args:
            query_list: What to search for, a query each.
        """
        if not 0 < len(query_list) <= _MOST_QUERIES:
            raise ValueError(f"query_list has {len(query_list)} queries; it must have 1 to {_MOST_QUERIES}")
        answer = await self._service.ask({"queries": query_list, "topk": self._topk, "return_scores": True})
        results = answer.get("result")
        if not isinstance(results, list) or len(results) != len(query_list):
            raise ServiceError(
                f"the service {self._service.url} received {len(query_list)} queries and must return "
                f'{{"result": [one list for each query]}}; it returned {str(answer)[:300]}'
            )
        return "\n---\n".join(self._result(documents) for documents in results)

    def _result(self, documents: Any) -> str:
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise ServiceError(
                f"the service {self._service.url} must return lists of documents; it returned: {str(documents)[:300]}"
            )
        texts = [self._contents(document) for document in documents[: self._topk]]
        if not texts:
            return "No documents were found."
        lines: list[str] = []
        for number, contents in enumerate(texts, 1):
            title, _, text = contents.partition("\n")
            if len(text) > self._document_chars:
                text = f"{text[: self._document_chars]} [...]"
            lines.append(f"Doc {number} (Title: {title})\n{text}")
        return "\n\n".join(lines).strip()

    def _contents(self, document: Any) -> str:
        # without scores, the service may return the documents without the outer object
        inner = document.get("document", document) if isinstance(document, Mapping) else None
        contents = inner.get("contents") if isinstance(inner, Mapping) else None
        if not isinstance(contents, str):
            raise ServiceError(
                f'the service {self._service.url} must return documents such as {{"document": {{"contents": '
                f'"Title\\ntext"}}, "score": 1.5}}; it returned {str(document)[:300]}'
            )
        return contents
