"""The rows of a recipe: read, limited, without prompts that are too long, and in which order they are used."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from turnwise.assembly.references import close_tried_environment, environment_constructor
from turnwise.chat.renderer import Renderer
from turnwise.compat.providers.provider import environment_class
from turnwise.data import rows as data_rows
from turnwise.data.conversations import read_conversations
from turnwise.data.order import Curriculum, Order, RowOrder, weighted_order
from turnwise.data.rows import BringsRows, ProvidedRows, read_rows
from turnwise.environments.environment import EnvironmentSource
from turnwise.errors import ConfigError, DataError, Failed, boundary
from turnwise.options.schema import Config
from turnwise.types import Row

__all__ = ["column_names", "conversations", "curriculum", "drop_long_prompts", "row_order", "rows"]

_log = logging.getLogger(__name__)


def rows(config: Config, *, held_out: bool = False, limit: int | None = None) -> list[Row]:
    """The rows of `data.train`, or the `held_out` rows of `data.eval`. `limit` is a bound in addition to data.max_rows:
    the smaller bound applies.

    Raises DataError, and ConfigError for a curriculum of rows of which none is used twice.
    """
    data = config.data
    bounds = [bound for bound in (limit, data.max_rows) if bound is not None]
    source = data.eval if held_out and data.eval is not None else data.train
    found = read_rows(
        source,
        columns=data.columns,
        split=data.eval_split if held_out else data.split,
        subset=data.subset,
        system=data.system_prompt,
        limit=min(bounds, default=None),
        writes_prompt=lambda: _environment_writes_prompt(config),
        provides=lambda count: _provided(config, held_out=held_out, count=count),
    )
    if not held_out and curriculum(config) is not None and any(row.seed_step for row in found):
        # each pass has other seeds: a pass rate would be stored for every row, and never be read
        raise ConfigError(
            f"data.curriculum has no effect on the rows that {config.environment.use} makes by seed: none is used twice. Remove "
            f'it, or set data.train to a file with the same seeds in each pass, of lines such as {{"seed": 0}}'
        )
    _check_ends(found, config, source)
    return found


def column_names(config: Config) -> frozenset[str]:
    """The names of the columns that rows of `data.train` have for reward functions, also if records are no rows.

    Raises DataError if they cannot be read, and ConfigError.
    """
    data = config.data
    return data_rows.column_names(
        data.train,
        columns=data.columns,
        split=data.split,
        subset=data.subset,
        limit=data.max_rows,
        provides=lambda count: _provided(config, held_out=False, count=count),
    )


def _check_ends(rows: Sequence[Row], config: Config, source: str | list[str]) -> None:
    """Refuse prompts that end with an answer, where the environment passes them on as they are: the model would begin a second
    answer behind the reference answer. An environment of the user's own may take the answer out, so this is only a warning.

    Raises DataError.
    """
    environment = config.environment.use
    answered = [row for row in rows if row.messages[-1]["role"] == "assistant"]
    if not answered or environment.startswith("turnwise.compat."):  # ms-swift's classes take the answer out
        return
    message = (
        f"{source}: the prompt of {len(answered)} of {len(rows)} rows ends with a message of the assistant (row "
        f"{answered[0].id!r}: {answered[0].messages[-1]['content']!r:.60}), so the model would begin a second answer behind it"
    )
    if environment.startswith("turnwise.environments."):
        raise DataError(
            f"{message}. If it is the reference answer, remove it from the prompt and put it into a column of its own, for the "
            f"reward function; `turnwise sft` trains on such answers"
        )
    _log.warning("%s, unless %s takes it out", message, environment)


def _environment_writes_prompt(config: Config) -> bool:
    """Whether the environment says that it writes the prompts (`writes_prompt = True`), so that rows may have none."""
    return bool(getattr(environment_class(config.environment.use), "writes_prompt", False))


def _provided(config: Config, *, held_out: bool, count: int | None) -> ProvidedRows:
    """The rows that the environment brings. Raises ConfigError if it brings none, or cannot be created."""
    use = config.environment
    try:
        with boundary("environment"):
            source = environment_constructor(use)()
    except Failed as failed:
        raise _config_error(failed, f"environment: {use.use} cannot be created") from failed
    if not isinstance(source, BringsRows):
        option = "data.eval=environment" if held_out and config.data.eval is not None else "data.train is missing"
        raise ConfigError(
            f"{option}: the environment {use.use} brings no rows (it has no method `rows`). Name a data set; for an environment "
            f"that writes its prompts itself, empty:64 is 64 rows without columns"
        )
    try:
        with boundary("environment"):
            return source.rows(count, held_out=held_out)
    except Failed as failed:
        raise _config_error(failed, f"environment: the rows of {use.use}") from failed
    finally:  # the conversations have another one: a server or a container of this one would run beside its
        if isinstance(source, EnvironmentSource):
            close_tried_environment(source.aclose, use.use)


def _config_error(failed: Failed, what: str) -> ConfigError:
    own = failed.__cause__
    return own if isinstance(own, ConfigError) else ConfigError(f"{what}: {failed.failure.message}")


def conversations(config: Config, *, held_out: bool = False) -> list[Row]:
    """The conversations of a recipe for fine-tuning: those of `data.train`, or the `held_out` ones of `data.eval`.

    Raises DataError.
    """
    data = config.data
    bounds = [bound for bound in (config.sft.max_eval_rows if held_out else None, data.max_rows) if bound is not None]
    return read_conversations(
        data.eval if held_out and data.eval is not None else data.train,
        columns=data.columns,
        split=data.eval_split if held_out else data.split,
        subset=data.subset,
        system=data.system_prompt,
        limit=min(bounds, default=None),
    )


def drop_long_prompts(config: Config, rows: Sequence[Row], renderer: Renderer) -> tuple[list[Row], list[str]]:
    """The rows whose prompts have at most data.max_prompt_tokens tokens, and a note with the number of the others.

    Raises DataError if no row is left.
    """
    longest = config.data.max_prompt_tokens
    if longest is None:
        return list(rows), []
    kept = [
        row
        for row in rows
        if len(renderer.for_arguments(row.chat_template_kwargs).encode_opening(row.messages, ()).token_ids) <= longest
    ]
    if rows and not kept:
        raise DataError(
            f"all {len(rows)} prompts have more than data.max_prompt_tokens={longest} tokens: raise this limit"
        )
    dropped = len(rows) - len(kept)
    note = f"{dropped} of {len(rows)} rows are left out: data.max_prompt_tokens={longest}"
    return kept, [note] if dropped else []


def row_order(config: Config, rows: Sequence[Row]) -> RowOrder:
    """The order in which the run uses its rows.

    Raises ConfigError if data.weights names a data set without rows.
    """
    data = config.data
    if data.weights is None:
        return Order(len(rows), seed=config.seed, shuffle=data.shuffle)
    weights = dict(zip(data.train, data.weights, strict=True))
    return weighted_order(rows, weights, seed=config.seed, shuffle=data.shuffle)


def curriculum(config: Config) -> Curriculum | None:
    """The recipe's curriculum; None if it skips no row."""
    options = config.data.curriculum
    if options.low is None and options.high is None:
        return None
    return Curriculum(
        low=-math.inf if options.low is None else options.low,
        high=math.inf if options.high is None else options.high,
        keep=options.keep,
        seed=config.seed,
    )
