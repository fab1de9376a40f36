"""Which parameters of a request have an effect, and what happens to the others.

The recipe decides how tokens are sampled, because training needs all tokens from the same distribution. A client's sampling
parameter therefore has no effect, and is counted. A parameter that would change the form of the answer is refused, and so is an
unknown parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from turnwise.environments.agents.chat_request import Refused
from turnwise.types import SamplingChange

__all__ = ["forced_parameters", "log_forced", "sampling_change"]

_FORCED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "parallel_tool_calls",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "verbosity",
    }
)
"""The recipe or the model decides these."""
_NEUTRAL = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
        "truncation",
        "include",
        "cache_control",
        "inference_geo",
        "client_metadata",
    }
)
"""These change neither the model's answer nor its form."""
_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "background": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "functions": [],
    "mcp_servers": [],
}
"""Parameters that are supported with one value only."""
_REASONS: Mapping[str, str] = {
    "n": "a conversation has one answer to each request: send several requests instead",
    "best_of": "a conversation has one answer to each request",
    "logprobs": "log-probabilities are in the record of the run, and are not sent to clients",
    "top_logprobs": "log-probabilities are in the record of the run, and are not sent to clients",
    "response_format": "answers cannot be constrained to a format: describe the format in the prompt, or use a tool",
    "output_format": "answers cannot be constrained to a format: describe the format in the prompt, or use a tool",
    "output_config": "answers cannot be constrained to a format: describe the format in the prompt, or use a tool",
    "text": "answers cannot be constrained to a format: describe the format in the prompt, or use a tool",
    "functions": "this parameter was replaced by `tools`",
    "function_call": "this parameter was replaced by `tool_choice`",
}
_MOST_STOP_TEXTS = 16
_log = logging.getLogger(__name__)
_logged: set[str] = set()


def forced_parameters(body: Mapping[str, Any], *, read: Collection[str]) -> dict[str, Any]:
    """The parameters of a request that have no effect. `read` are those that the API's own code reads.

    Raises Refused for a parameter that is not supported.
    """
    forced: dict[str, Any] = {}
    for name, value in body.items():
        if name in read or value is None or name in _NEUTRAL:
            continue
        if name in _FORCED:
            forced[name] = value
        elif name not in _DEFAULTS or value != _DEFAULTS[name]:
            reason = _REASONS.get(name, "the parameter is unknown here, and no parameter is ignored: leave it out")
            raise Refused(400, f"{name:.80}={value!r:.80} is not supported: {reason}", parameter=name[:80])
    return forced


def sampling_change(body: Mapping[str, Any], *, max_tokens: Collection[str], stop: str) -> SamplingChange:
    """The longest turn and the stop texts that a client asked for, which may be as short as it likes.

    `max_tokens` and `stop` are the names of the parameters. Raises Refused if a value has the wrong type.
    """
    most = [body[name] for name in max_tokens if body.get(name) is not None]
    for value in most:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(400, f"{max_tokens}={value!r:.80}: the value must be an integer of at least 1")
    texts = body.get(stop)
    texts = [texts] if isinstance(texts, str) else texts
    if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        raise Refused(400, f"{stop}={texts!r:.80} must be a list of texts that are not empty", parameter=stop)
    if texts and len(texts) > _MOST_STOP_TEXTS:
        raise Refused(400, f"{stop} has {len(texts)} texts; at most {_MOST_STOP_TEXTS} are allowed", parameter=stop)
    # a client that asks for few tokens expects the beginning of an answer
    return SamplingChange(max_tokens=min(most, default=None), stop=texts or None, answers_cut=True)


def log_forced(forced: Mapping[str, Any]) -> None:
    """Log each parameter without effect once in a process."""
    for name, value in forced.items():
        if name not in _logged:
            _logged.add(name)
            _log.warning(
                "an agent's request sets %s=%.80r, which has no effect: the recipe decides how tokens are sampled. Later "
                "requests are counted in the metric metrics/agent/forced",
                name,
                value,
            )
