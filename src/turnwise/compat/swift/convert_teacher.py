"""Converts ms-swift's arguments about distillation into the section `teacher`: GKD, and GRPO with a teacher (OPD-RL).

GKD (`rlhf_type` gkd) learns from a divergence between complete distributions, without rewards: `teacher.signal: divergence`. GRPO
with a teacher adds the difference of log-probabilities of each sampled token to its advantages: `teacher.signal: sampled`. With a
column `teacher_prompt` in the data, the teacher reads this text in place of the last message of the user (`teacher_prompt`).
Knows these arguments; the other arguments of both are converted by `convert_training`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.compat.swift.convert_training import convert_samples, first_row
from turnwise.compat.swift.read_arguments import REWARD_FREE, SwiftRecipeBuilder
from turnwise.errors import ConfigError
from turnwise.json_yaml import parse_json
from turnwise.types import Message, Trajectory, Turn

__all__ = ["TEACHER_ARGUMENTS", "convert_gkd", "convert_opd", "has_teacher", "teacher_prompt"]

_OF_GKD = ("lmbda", "sft_alpha", "seq_kd", "gkd_logits_topk")
_OF_OPD = ("teacher_kl_coef", "advantage_reweight", "sdar_loss_coef")
_SOURCES = ("teacher_model", "teacher_model_server")
TEACHER_ARGUMENTS = (*_SOURCES, "teacher_tag_key", *_OF_GKD, *_OF_OPD)
"""The arguments that this module converts."""

_PROMPT = "teacher_prompt"
_CONTEXT = f"turnwise.compat.swift:{_PROMPT}"


def teacher_prompt(trajectory: Trajectory, turn: Turn) -> list[Message]:
    """What a teacher of ms-swift reads before a turn: the column `teacher_prompt` in place of the last message of the user.

    For `teacher.context`. Rows without the column are read as they are.
    """
    messages = trajectory.messages[: turn.message_index]
    text = trajectory.row.fields.get(_PROMPT)
    last = next((n for n in range(len(messages) - 1, -1, -1) if messages[n]["role"] == "user"), None)
    if not text or last is None:
        return messages
    return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]


def has_teacher(builder: SwiftRecipeBuilder) -> bool:
    """Whether the arguments name a teacher, or the rows have a prompt of their own for the trained model as its teacher."""
    return any(builder.values.get(key) is not None for key in _SOURCES) or _shows_more(builder)


def convert_gkd(builder: SwiftRecipeBuilder) -> None:
    """Set teacher, credit and loss of `rlhf_type` gkd. model.lora and sampling are set before."""
    builder.set("credit.name", "none", "rlhf_type")
    builder.set("loss.normalizer", "token")
    builder.set("teacher.signal", "divergence", "rlhf_type")
    beta = builder.value("beta")
    if beta in (0, 1):
        builder.set("teacher.divergence", "reverse_kl" if beta else "forward_kl", "beta")
    else:
        builder.set("teacher.divergence", "jsd", "beta")
        builder.set("teacher.beta", beta, "beta")
    convert_samples(builder)
    builder.reject("sft_alpha", "it has no effect on conversations of the student (lmbda=1), also not in ms-swift")
    _convert_top_k(builder)
    _convert_source(builder)
    filters = [key for key in ("top_p", "top_k", "min_p") if builder.values.get(key) not in (None, 0, -1, 1)]
    for key in filters:
        reason = "the divergence is that of complete distributions, and the student must sample from its own: remove it"
        builder.reject(key, reason, changes_training=True)
    builder.set("train.ppo_epochs", 1)
    for key in REWARD_FREE:
        builder.reject(
            key, "it has no effect with rlhf_type=gkd, which learns nothing from rewards, also not in ms-swift"
        )
    if builder.values.get("num_generations") not in (None, 1):
        reason = "GKD samples one conversation of each row: set train.group_size in the recipe for more"
        builder.reject("num_generations", reason, changes_training=True)
    for key in _OF_OPD:
        builder.reject(key, "it has no effect with rlhf_type=gkd, also not in ms-swift")


def _convert_top_k(builder: SwiftRecipeBuilder) -> None:
    key = "gkd_logits_topk"
    if (count := builder.values.get(key)) is None:
        if builder.get("cluster.launcher") is not None:
            reason = (
                "with several processes, the divergence is over the teacher's likely tokens only: set it, such as 64"
            )
            builder.reject(key, reason, changes_training=True, even_default=True)
        builder.convert("nothing: the divergence is over the complete vocabulary", key)
        return
    builder.set("teacher.top_k", count, key)
    reason = (
        "ms-swift divides the probabilities of these tokens by their sum, so that others do not count; here all other tokens are "
        "one class beside them"
    )
    builder.assume(key, count, reason)


def convert_opd(builder: SwiftRecipeBuilder, *, rewards: bool) -> None:
    """Set teacher of `rlhf_type` grpo, and credit=none without `rewards`. credit is set before."""
    for key in _OF_GKD:
        builder.reject(key, "it has no effect without rlhf_type=gkd, also not in ms-swift")
    for key in ("advantage_reweight", "sdar_loss_coef"):
        reason = (
            "a teacher's signal is added to the advantages: write another one as a function (docs/own_algorithm.md)"
        )
        if builder.values.get(key):
            builder.reject(key, reason, changes_training=True)
        builder.convert("nothing: it is off", key)
    if not has_teacher(builder):
        for key in ("teacher_kl_coef", "teacher_tag_key"):
            builder.reject(key, "it has no effect without a teacher, also not in ms-swift")
        builder.convert("nothing: there is no teacher", *_SOURCES)
        return
    if not rewards:
        builder.recipe["credit"] = {}
        builder.set("credit.name", "none")
    builder.set("teacher.signal", "sampled")
    builder.set("teacher.coef", builder.value("teacher_kl_coef"), "teacher_kl_coef")
    _convert_source(builder)


def _convert_source(builder: SwiftRecipeBuilder) -> None:
    """Set the teachers: a local model, servers, or the trained model itself."""
    path, server = (builder.values.get(key) for key in _SOURCES)
    if server is not None:
        _convert_servers(builder, server)
    else:
        builder.reject("teacher_tag_key", "it has no effect without several teacher_model_server, also not in ms-swift")
    if path is not None:
        builder.set("teacher.path", path, "teacher_model")
        if path == builder.values.get("model") and builder.get("model.lora.rank") is None and not _shows_more(builder):
            reason = "the teacher is the model that is trained: it would hold the student where it began, as loss.kl_coef does"
            builder.reject("teacher_model", reason, changes_training=True)
    builder.convert("teacher", *_SOURCES)
    alone = path is None and server is None
    if alone or _shows_more(builder):
        _show_more(builder, alone=alone)
    elif path is not None and path == builder.values.get("model"):
        reason = (
            f"if the rows have a column {_PROMPT}, which the teacher reads in ms-swift, set teacher.context={_CONTEXT}"
        )
        builder.assume("teacher_model", path, reason)


def _show_more(builder: SwiftRecipeBuilder, *, alone: bool) -> None:
    """Set what the teacher reads. With a divergence, another context needs the likely tokens only."""
    models: list[dict[str, Any]] | None = builder.get("teacher.models")
    if models is None:
        builder.set("teacher.context", _CONTEXT)
    for model in models or ():
        model["context"] = _CONTEXT
    if builder.get("teacher.signal") == "divergence" and builder.get("teacher.top_k") is None:
        who = "the trained model itself" if alone else "a teacher with another prompt"
        reason = f"the divergence from {who} is over its likely tokens only: set gkd_logits_topk, such as 64"
        builder.reject("gkd_logits_topk", reason, changes_training=True, even_default=True)


def _convert_servers(builder: SwiftRecipeBuilder, given: Any) -> None:
    key, tag = "teacher_model_server", "teacher_tag_key"
    servers = _servers(given)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if builder.value(name) not in (None, 0, -1, 1):
            reason = (
                "a server gives log-probabilities at temperature 1 without filters: sample from these (temperature=1)"
            )
            builder.reject(name, reason, changes_training=True, even_default=True)
    reason = "start the teacher with `vllm serve` (or SGLang, with teacher.server=sglang) in place of `swift deploy`"
    builder.assume(key, given, reason)
    if len(servers) == 1:
        builder.set("teacher.url", servers[0]["url"], key)
        builder.reject(tag, "it has no effect with one teacher, also not in ms-swift")
        return
    column = builder.value(tag)
    if column == "dataset":
        reason = (
            "the teacher of a row is chosen by a column of the data, and not by its data set: write the name of the teacher into "
            "a column, and name the column in teacher_tag_key"
        )
        builder.reject(tag, reason, changes_training=True, even_default=True)
    builder.set("teacher.column", column, tag)
    models = [{"name": str(name), "url": one["url"]} for one in servers for name in one.get("tags") or ()]
    builder.set("teacher.models", models, key)


def _servers(given: Any) -> list[Mapping[str, Any]]:
    """The servers of an address, or of a list of mappings with `url` and `tags`, which may be JSON. Raises ConfigError."""
    if isinstance(given, str) and given.lstrip().startswith("["):
        given = parse_json(given, where="--teacher_model_server", error=ConfigError)
    if isinstance(given, str):
        return [{"url": given}]
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(one, Mapping) and one.get("url") for one in given)
    ):
        raise ConfigError(f"--teacher_model_server: {given!r:.80} is neither an address nor a list of {{url, tags}}")
    return given


def _shows_more(builder: SwiftRecipeBuilder) -> bool:
    """Whether the first row of the data has a prompt for the teacher. False if the data cannot be read here."""
    return bool((first_row(builder) or {}).get(_PROMPT))
