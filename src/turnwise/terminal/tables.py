"""Metrics as tables and curves of text, and the results of an evaluation as tables.

The tables of an evaluation have lines and colours on a terminal, and are aligned plain text elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.errors import counted

if TYPE_CHECKING:
    from turnwise.record.evaluation import Comparison, Estimate, EvaluationResult, ModelResult, ResultPart

# metrics

_LEVELS = "▁▂▃▄▅▆▇█"
_ROUNDING = 1e-12
"""Numbers up to this size are rounding errors of 0."""


def steps_table(metrics: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    table = Table(box=None)
    for label in ("step", *columns):
        table.add_column(label, justify="right")
    stride = max(1, len(metrics) // 10)
    chosen = [step for place, step in enumerate(metrics) if place % stride == 0 or place == len(metrics) - 1]
    for step in chosen:
        table.add_row(str(step.get("step", "-")), *(number(step.get(name)) for name in columns.values()))
    return table


def evaluations_table(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """The first evaluation beside the last one, of as many conversations as the last; only the last if there is only one, as
    after an early Ctrl-C. A run that was resumed with other held-out rows has evaluations that cannot be compared."""
    last = evaluations[-1]
    count = last.get("conversations")
    comparable = [one for one in evaluations if one.get("conversations") == count]
    left_out, evaluations = len(evaluations) - len(comparable), comparable
    first = evaluations[0]
    title = "held-out questions" if "reward/mean" in last else "held-out conversations"
    if left_out:
        title += f" ({left_out} evaluations of another number of conversations than {count} are left out)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    shown = [first, last] if len(evaluations) > 1 else [last]
    for label, evaluation in zip(("before", "after") if len(shown) > 1 else ("so far",), shown, strict=True):
        table.add_column(f"{label} (step {evaluation.get('step', '-')})", justify="right")
    names = ["reward/mean", "reward/std", "pass_rate", "turns/mean", "tool_calls/mean", "tool_errors/mean", "entropy"]
    names = names if "reward/mean" in last else ["loss"]
    names = ["conversations", *names] if count is not None else names
    names += [name for name in last if name.startswith("stop/") and (first.get(name) or last.get(name))]
    for name in names:
        whole = name == "conversations"
        table.add_row(name, *(str(one.get(name)) if whole else number(one.get(name)) for one in shown))
    return table


def number(value: Any) -> str:
    """A figure in a table; a dash where there is none. Example: 0.12345 is `0.123`, and 0.00012 is `1.2e-04`."""
    return _figure(value, 3) if isinstance(value, int | float) else "-"


def exact_number(value: Any) -> str:
    """A value of a metric where it stands alone: of a fraction, 6 significant digits. Example: 0.00023999999999999998 is
    `0.00024`, and what is no fraction is JSON: `12345678`, `null`."""
    return f"{value:z.6g}" if isinstance(value, float) else json.dumps(value)


def _figure(value: float, digits: int) -> str:
    """A number with `digits` decimal places, or with an exponent where these would all be 0 and the number is not. A 0 has no
    sign: the entropy of greedy sampling is -0.0."""
    text = f"{value:z.{digits}f}"
    return f"{value:.1e}" if abs(value) > _ROUNDING and float(text) == 0.0 else text


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text."""
    if not values:
        return ""
    shown = [values[place * len(values) // min(width, len(values))] for place in range(min(width, len(values)))]
    shown[-1] = values[-1]
    low, high = min(shown), max(shown)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return (
        "".join(_LEVELS[round((value - low) * scale)] for value in shown)
        + f" {_figure(values[0], 2)} → {_figure(values[-1], 2)}"
    )


# results of an evaluation


def print_results(console: Console, result: EvaluationResult) -> None:
    """Print the results: one row for each model, the comparisons, and the parts by data source and by number of turns."""
    title = (
        f"{counted(result.rows, 'row')} of {result.data}, {counted(result.samples_per_row, 'conversation')} on each row, seed "
        f"{result.seed}; "
        f"passed: reward of at least {result.pass_reward:g}; intervals of {result.confidence:.0%}, clustered by row"
    )
    parts_of_models = [part for model in result.models for part in (*model.sources.values(), *model.turns.values())]
    if any(part.reward.rows < _FEW_ROWS for part in [*result.models, *parts_of_models]):
        title += f"; *: of fewer than {_FEW_ROWS} rows, so the interval is rough"
    _line(console, title)
    print_table(console, _models(result))
    if (largest := result.largest_that_failed) is not None:
        _line(
            console,
            f"\nno conversation passed, because the largest reward is {largest:g}: if that is a right answer, evaluate again "
            f"with a smaller eval.pass_reward and resume=auto, which keeps the conversations",
        )
    if result.comparisons:
        _line(console, "\nthe first model minus the second, on the same rows and seeds (paired):")
        if result.compared_with_first_only:
            # here, because `turnwise show` of a run does without the statistics
            from turnwise.record.evaluation import MOST_IN_ALL_PAIRS

            _line(
                console,
                f"(each model is compared with {result.models[0].name} only, because there are more than "
                f"{MOST_IN_ALL_PAIRS} models: for other pairs, evaluate fewer)",
            )
        print_table(console, [_COMPARED, *(_comparison(comparison) for comparison in result.comparisons)], keys=2)
    if any(model.sources for model in result.models):
        _line(console, "\nby data source:")
        parts = [(model, source, part) for model in result.models for source, part in model.sources.items()]
        print_table(
            console, [["model", "source", *_PART], *([m.name, name, *_part(part)] for m, name, part in parts)], keys=2
        )
    _line(console, "\nby number of turns:")
    by_turns = [(model, number, part) for model in result.models for number, part in model.turns.items()]
    print_table(
        console, [["model", "turns", *_PART], *([m.name, str(n), *_part(part)] for m, n, part in by_turns)], keys=2
    )


_PART = ["conversations", "reward", "pass rate"]
_FEW_ROWS = 30
"""Below this number of rows, a number is marked: its interval is rough, because it assumes that means of rows are nearly
normal."""
_SMALLEST_P = 1e-15
"""Smaller p-values are not told apart: the distribution of the mean is not known so exactly."""
_COMPARED = ["first", "second", "rows", "difference", "better/equal/worse", "p (t-test)", "p (sign flips)"]


def _models(result: EvaluationResult) -> list[list[str]]:
    ks = [k for k in sorted({k for model in result.models for k in model.pass_at}) if k > 1]
    header = ["model", "reward", "pass rate"]
    header += [f"pass@{k}" for k in ks] + [f"pass^{k}" for k in ks]
    header += ["turns", "tokens", "seconds", "failed"]
    return [header, *(_model(model, ks) for model in result.models)]


def _model(model: ModelResult, ks: Sequence[int]) -> list[str]:
    """The cells of a model. Tokens and seconds are those of one conversation."""
    passes = [_mean(model.pass_at.get(k)) for k in ks] + [_mean(model.pass_all.get(k)) for k in ks]
    cost = [_number(model.cost.tokens_per_conversation, 0), _number(model.cost.seconds_per_conversation, 2)]
    failed = f"{model.failed} of {model.conversations}" if model.failed else "0"
    return [
        model.name,
        interval(model.reward),
        interval(model.pass_rate),
        *passes,
        _number(model.turns_mean, 2),
        *cost,
        failed,
    ]


def _comparison(comparison: Comparison) -> list[str]:
    test = comparison.test
    return [
        comparison.first,
        comparison.second,
        str(test.difference.rows),
        interval(test.difference, sign=True),
        f"{test.better}/{test.equal}/{test.worse}",
        p_value(test.p_t),
        p_value(test.p_sign_flip),
    ]


def _part(part: ResultPart) -> list[str]:
    return [str(part.conversations), interval(part.reward), interval(part.pass_rate)]


def interval(value: Estimate, *, sign: bool = False) -> str:
    """`0.412 [0.351, 0.473]`; with a star if there are few rows; a dash without rows."""
    if value.mean is None:
        return "-"
    mean = f"{value.mean:+z.3f}" if sign else f"{value.mean:z.3f}"
    few = "*" if value.rows < _FEW_ROWS else ""
    return (
        mean + few if value.low is None or value.high is None else f"{mean} [{value.low:z.3f}, {value.high:z.3f}]{few}"
    )


def _mean(value: Estimate | None) -> str:
    return "-" if value is None else _number(value.mean, 3)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else _figure(value, digits)


def p_value(value: float | None) -> str:
    """`0.0412`, `5.0e-05`; a p-value is never 0, so the smallest are `<1e-15`."""
    if value is None:
        return "-"
    if value < _SMALLEST_P:
        return f"<{_SMALLEST_P:.0e}"
    return f"{value:.4f}" if value >= 1e-3 else f"{value:.1e}"


def print_table(console: Console, rows: Sequence[Sequence[str]], *, keys: int = 1, widest: int | None = None) -> None:
    """A table whose first row is the header, and whose first `keys` columns say what a row is about.

    On a terminal that is too narrow, the other columns are divided into several tables. Elsewhere, aligned text that is never cut
    or wrapped, divided in the same way if lines are longer than `widest` characters.
    """
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    if console.is_terminal:
        for part in _fitting(widths, console.width, keys):
            table = Table()
            for place in part:
                key = place < keys
                table.add_column(
                    Text(rows[0][place]), justify="left" if key else "right", no_wrap=not key, overflow="fold"
                )
            for row in rows[1:]:
                table.add_row(*(Text(row[place]) for place in part))
            console.print(table)
        return
    parts = [range(len(widths))] if widest is None else _fitting(widths, widest, keys)
    for number, part in enumerate(parts):
        if number:
            _line(console, "")
        for row in rows:
            cells = [row[n].ljust(widths[n]) if n == 0 else row[n].rjust(widths[n]) for n in part]
            _line(console, "  ".join(cells).rstrip())


def _fitting(widths: Sequence[int], space: int, keys: int) -> list[list[int]]:
    """The columns of each table: the key columns, and as many others as fit into `space` characters, at least one."""
    border = 3  # a column has a line at its left and a blank at both sides
    key_width = 1 + sum(width + border for width in widths[:keys])
    parts: list[list[int]] = []
    left = 0
    for place in range(keys, len(widths)):
        width = widths[place] + border
        if not parts or width > left:
            parts.append(list(range(keys)))
            left = space - key_width
        parts[-1].append(place)
        left -= width
    return parts


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
