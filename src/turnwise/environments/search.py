"""A search engine as a tool: questions to a retrieval service that speaks Search-R1's protocol.

`POST {"queries": [...], "topk": 3, "return_scores": true}` is answered by `{"result": [[{"document": {"contents":
"Title\\ntext"}, "score": 1.5}, ...], ...]}`, a list for each query. `turnwise retrieval` is such a service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.environments.service import ServiceError, service
from turnwise.errors import ConfigError

__all__ = ["Search"]

_MOST_QUERIES = 20


class Search:
    """A tool that finds documents.

    `topk` documents are told for each query, `document_chars` of each. `timeout` is that of one request, in seconds; `retries`
    further ones follow where the service is away, overloaded or broken, with a pause that grows by `pause` seconds, all
    within `deadline`. `max_concurrent` requests are out at once, over all conversations. `token` is sent as a bearer token.
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
                raise ConfigError(f"Search: {name} is {value}; give a number above 0")
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
            raise ValueError(f"query_list has {len(query_list)} queries; give 1 to {_MOST_QUERIES}")
        answer = await self._service.ask({"queries": query_list, "topk": self._topk, "return_scores": True})
        found = answer.get("result")
        if not isinstance(found, list) or len(found) != len(query_list):
            raise ServiceError(
                f"the service {self._service.url} was asked {len(query_list)} queries and must answer "
                f'{{"result": [a list for each]}}; it answered {str(answer)[:300]}'
            )
        return "\n---\n".join(self._told(documents) for documents in found)

    def _told(self, documents: Any) -> str:
        if not isinstance(documents, Sequence) or isinstance(documents, str):
            raise ServiceError(f"the service {self._service.url} answered no list of documents: {str(documents)[:300]}")
        texts = [self._contents(document) for document in documents[: self._topk]]
        if not texts:
            return "No documents were found."
        told: list[str] = []
        for number, contents in enumerate(texts, 1):
            title, _, text = contents.partition("\n")
            if len(text) > self._document_chars:
                text = f"{text[: self._document_chars]} [...]"
            told.append(f"Doc {number} (Title: {title})\n{text}")
        return "\n\n".join(told).strip()

    def _contents(self, document: Any) -> str:
        # without scores, the documents stand there bare
        inner = document.get("document", document) if isinstance(document, Mapping) else None
        contents = inner.get("contents") if isinstance(inner, Mapping) else None
        if not isinstance(contents, str):
            raise ServiceError(
                f'the service {self._service.url} must answer documents such as {{"document": {{"contents": '
                f'"Title\\ntext"}}, "score": 1.5}}; it answered {str(document)[:300]}'
            )
        return contents
