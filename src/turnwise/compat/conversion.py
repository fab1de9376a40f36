"""A recipe made from another system's configuration, with a report on every key; and Hydra's YAML files, without Hydra.

Knows the parts of Hydra and OmegaConf that verl's configurations use: mappings, defaults lists, overrides and `${...}`. Does not
know the keys of any system. A value that cannot be resolved is reported by its key, never guessed."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.json_yaml import PlainLoader, parse_yaml, read_text

_NOT_TRIED = "it could not be tried, because there is no file"


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """A key of the other system's configuration that is not in the recipe, or not with the same meaning."""

    key: str
    value: Any
    reason: str
    """Why the key is not in the recipe, and what to do instead."""
    changes_training: bool = False
    """True if training without this key gives a different result. `turnwise train` refuses such a configuration."""

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.reason}"


_LONGEST_VALUE = 60
_OPTION = re.compile(r"(?P<option>[a-z_]+(\.[a-z_]+)*)(=(?P<value>\S+))?(?P<rest>( \(.*)?)$")
"""An option of the recipe as `RecipeBuilder.convert` is told it: `train.steps`, `loss.kl_estimator=k3`, `train.steps (...)`."""


def _short(value: Any) -> str:
    """A value on one line: a plain text without quotation marks, and cut where it is long."""
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """A recipe made from another system's configuration, and a report about each of its keys."""

    recipe: dict[str, Any]
    """The recipe as nested dictionaries, as `yaml.safe_load` would return it."""
    converted: dict[str, str] = field(default_factory=dict)
    """For each converted key: the option of the recipe that it became, or a short description."""
    unsupported: list[UnsupportedKey] = field(default_factory=list)
    """The keys that were not converted. `converted` and `unsupported` together hold every key that was given."""
    assumptions: list[UnsupportedKey] = field(default_factory=list)
    """Values that the configuration does not contain and that were assumed, and keys whose meaning differs here.
    The user should check them."""
    failing: list[UnsupportedKey] = field(default_factory=list)
    """Options of the recipe that do not work here: values that the schema refuses, and names that could not be loaded."""
    files: dict[Path, str] = field(default_factory=dict)
    """Files that the recipe names and that are not here, with their contents: `turnwise convert --out` writes them."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values of the converted keys, or the other system's defaults where they are null."""
    refused_start: str = ""
    """Why `turnwise train` would refuse the recipe here before it loads the model, if `turnwise convert` has found that."""

    def refused(self) -> list[UnsupportedKey]:
        """The unsupported keys without which training would give a different result."""
        return [key for key in self.unsupported if key.changes_training]

    def became(self) -> list[str]:
        """For each converted key, what it became in the recipe: `rollout.n=4 -> train.group_size=4`."""
        return [
            f"{key}={_short(self.values[key])} -> {', '.join(dict.fromkeys(map(self._with_value, result.split(', '))))}"
            if key in self.values
            else f"{key} -> {result}"
            for key, result in self.converted.items()
        ]

    def _with_value(self, result: str) -> str:
        """A part of an entry of `converted`, with the value that the recipe has for an option without one."""
        named = _OPTION.match(result)
        if named is None:
            return result
        option, given, rest = named["option"], named["value"], named["rest"]
        value = at(self.recipe, option)
        if given is not None:  # written without `set`, so that the recipe has it only where another key has set it
            return f"{result} (the default)" if value is MISSING and "." in option else result
        return result if value is MISSING or isinstance(value, list | dict) else f"{option}={_short(value)}{rest}"

    def not_tried(self) -> list[UnsupportedKey]:
        """What could not be loaded, because its file is not here."""
        return [key for key in self.assumptions if key.reason.startswith(_NOT_TRIED)]


class RecipeBuilder(ABC):
    """Builds a recipe from a configuration, and records what happens to each key.

    A subclass knows how to look up a key. A key is either in `converted` or in `unsupported`. A key can be
    in both only if it has several values and one of them was rejected (`reject_value`).
    """

    def __init__(self) -> None:
        self.recipe: dict[str, Any] = {}
        self.converted: dict[str, str] = {}
        self.unsupported: list[UnsupportedKey] = []
        self.assumptions: list[UnsupportedKey] = []
        self.failing: list[UnsupportedKey] = []

    def try_name(self, option: str, value: Any, load: Callable[[], Any], *, files: Sequence[Any] = ()) -> None:
        """Load what an option of the recipe names, and report why it cannot be loaded.

        If one of `files` is not here, or its name contains a variable, nothing is loaded and this is reported.
        """
        missing = [file for file in map(str, files) if not os.path.exists(os.path.expanduser(file))]
        if missing:
            reason = f"{_NOT_TRIED} {missing[0]} here"
            self.assumptions.append(UnsupportedKey(option, value, reason))
            return
        try:
            load()
        except ConfigError as error:
            self.failing.append(UnsupportedKey(option, value, str(error)))

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether the configuration contains the key, with any value."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """The value of a key, or the other system's default."""

    def set(self, option: str, value: Any, *keys: str) -> None:
        """Set an option of the recipe. `keys` are the keys that it was made from."""
        node = self.recipe
        *parents, last = option.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        self.convert(option, *keys)

    def get(self, option: str, default: Any = None) -> Any:
        """The value of an option in the recipe built so far."""
        node: Any = self.recipe
        for part in option.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def convert(self, result: str, *keys: str) -> None:
        """Record that the given keys were converted to `result`. Keys that are not in the configuration are skipped."""
        for key in keys:
            if self.has(key) and not self.is_unsupported(key):
                self.converted[key] = f"{self.converted[key]}, {result}" if key in self.converted else result

    def reject(self, key: str, reason: str, *, changes_training: bool = False, even_default: bool = False) -> None:
        """Record that a key has no place in the recipe.

        A key that is not in the configuration is skipped, unless `even_default`: then the default matters too.
        """
        if (self.has(key) or even_default) and not self.is_unsupported(key):
            self.converted.pop(key, None)
            self.unsupported.append(UnsupportedKey(key, self.value(key), reason, changes_training))

    def reject_value(self, key: str, value: Any, reason: str, *, changes_training: bool = False) -> None:
        """Record that one value of a key has no place in the recipe. The key may be converted otherwise."""
        self.unsupported.append(UnsupportedKey(key, value, reason, changes_training))

    def assume(self, key: str, value: Any, reason: str) -> None:
        """Record an assumption that the user should check."""
        self.assumptions.append(UnsupportedKey(key, value, reason))

    def is_unsupported(self, key: str) -> bool:
        """Whether the key, or one value of it, was rejected."""
        return any(rejected.key == key for rejected in self.unsupported)

    def keep_float32(self) -> None:
        """Set the data type of the weights, if the configuration gives none: what was converted and rejected depends on it, and
        the recipe's own default depends on the machine."""
        if self.recipe and self.get("model.dtype") is None:
            self.set("model.dtype", "float32")

    def report(self) -> ConversionReport:
        """The recipe and the report about all keys."""
        values = {key: self.value(key) for key in self.converted}
        return ConversionReport(
            self.recipe, self.converted, self.unsupported, self.assumptions, self.failing, values=values
        )


MISSING = object()
"""Returned by `at` if there is no value."""

_INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20  # nested interpolations


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""The names of `loggers[].name`."""
_WRITTEN = frozenset({"console", "file", "none", "all"})
"""Names in lists of loggers that name no tracker: what they stand for is always written, or depends on installed packages."""


def convert_loggers(builder: RecipeBuilder, key: str, *, project: str | None, run: str | None) -> None:
    """Set `loggers` to the experiment trackers that `key` names, such as `["console", "wandb"]`. `project` and `run` are the keys
    of their names, if the configuration has them."""
    if not builder.has(key):
        return
    given = builder.value(key)
    names = [str(name) for name in given] if isinstance(given, list) else [] if given is None else [str(given)]
    known = [name for name in names if name in TRACKERS]
    called = {option: named for option, named in (("project", project), ("run", run)) if named is not None}
    if known:
        about = {option: str(builder.value(named)) for option, named in called.items()}
        builder.set("loggers", [{"name": name, **about} for name in known], key, *called.values())
    if others := [name for name in names if name not in TRACKERS and name not in _WRITTEN]:
        reason = f"there is no logger {', '.join(others)}; loggers can be {', '.join(TRACKERS)} (docs/loggers.md)"
        builder.reject_value(key, given, reason)
    elif not known:
        builder.reject(key, "metrics.jsonl, the curve and all conversations are always written (docs/record.md)")


def convert_kernels(builder: RecipeBuilder, key: str) -> None:
    """Set `model.kernels` where `key` asks for liger-kernel."""
    if builder.value(key):
        builder.set("model.kernels", "liger", key)
    else:
        builder.convert("nothing: model.kernels=auto uses liger-kernel where it is installed and runs", key)


class _Yaml(PlainLoader):
    """YAML as OmegaConf reads it: `1e-6` is a number, a date is a text, and a repeated key is an error."""


_Yaml.yaml_implicit_resolvers = {key: list(value) for key, value in PlainLoader.yaml_implicit_resolvers.items()}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path, *, what: str) -> dict[str, Any]:
    """The mapping in a YAML file; `what` names the file's purpose in error messages.

    Raises ConfigError.
    """
    tree = _read(path, what)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{what} {path} must contain a mapping; it contains {'nothing' if tree is None else repr(tree)[:80]}"
        )
    return tree


def read_list(path: Path, *, what: str) -> list[Any]:
    """The list in a YAML file; `what` names the file's purpose in error messages. `${...}` is replaced.

    Raises ConfigError.
    """
    entries = _read(path, what)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{what} {path} must contain a list; it contains {'nothing' if not entries else repr(entries)[:80]}"
        )
    tree, left = resolved({"entries": entries})
    if left:
        raise ConfigError(
            f"{what} {path}: {left[0]} has an interpolation that cannot be resolved: set the variable it names"
        )
    return tree["entries"]


def _read(path: Path, what: str) -> Any:
    try:
        return _parse(read_text(path, error=ConfigError), where=str(path))
    except ConfigError as error:
        raise ConfigError(f"{what} {error}") from None


def compose(folder: Path, name: str, *, leaving_out: Callable[[str], bool] = lambda target: False) -> dict[str, Any]:
    """Read `folder/name.yaml` and merge the files of its defaults list, which are in the same directory.

    A file's own keys override those of its defaults, unless `_self_` has another position in the list, as in Hydra 1.1 and
    later. Files for which `leaving_out` returns True are not read. Raises ConfigError.
    """
    path = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    own = read_mapping(path, what="the configuration")
    tree: dict[str, Any] = {}
    defaults = own.pop("defaults", None) or []
    if not isinstance(defaults, list):
        raise ConfigError(f"{path}: defaults must be a list; it is {defaults!r:.80}")
    if "_self_" not in defaults:
        defaults = [*defaults, "_self_"]
    for entry in defaults:
        if entry == "_self_":
            _merge(tree, own)
            continue
        for target, package in _default(entry):
            if leaving_out(target):
                continue
            beside = folder / f"{target}.yaml"
            if not os.path.isfile(beside):
                raise ConfigError(f"{path}: the defaults list names {target}, but the file {beside} does not exist")
            part = compose(folder, target, leaving_out=leaving_out)
            _merge(tree, _under(_package(beside, package), part))
    return tree


def override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides as Hydra writes them: `a.b=value`, `+a.b=value`, `++a.b=value`, `~a.b`.

    Raises ConfigError.
    """
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        *parents, last = key.lstrip("+~").split(".")
        if not last or (not equals and not key.startswith("~")):
            raise ConfigError(f"{text!r} is not an override; write key=value, for example trainer.total_epochs=15")
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"{text!r}: {parent} is {child!r:.80} and has no keys")
            node = child
        if key.startswith("~"):
            if last not in node:
                raise ConfigError(f"{text!r}: the configuration has no key {key[1:]}")
            del node[last]
            continue
        node[last] = _parse(value, where=f"{text!r}: the value")


def at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or `MISSING`."""
    for part in key.split("."):
        if isinstance(tree, Mapping) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return MISSING
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are not mappings, with their dotted keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def resolved(tree: dict[str, Any], fallback: Callable[[str], Any] = lambda key: MISSING) -> tuple[Any, list[str]]:
    """The tree with `${a.b}`, `${oc.env:NAME,default}` and `${oc.select:a.b,default}` replaced, and the unresolved keys.

    `fallback` gives the value of a key that the tree does not have, or `MISSING`.
    """
    left: list[str] = []

    def value_of(expression: str, key: str, depth: int) -> Any:
        name, colon, rest = expression.partition(":")
        first, comma, default = rest.partition(",")
        if colon and name.strip() in ("oc.env", "env"):  # texts, also the defaults, as in OmegaConf
            text = _parse(default.strip(), where=f"{key}: the default") if comma else MISSING
            text = str(text) if isinstance(text, int | float) else text
            return os.environ.get(first.strip(), text)
        if colon and name.strip() == "oc.select":
            value: Any = look_up(first.strip(), key, depth)
        elif colon:
            return MISSING
        else:
            return look_up(expression.strip(), key, depth)
        return _parse(default.strip(), where=f"{key}: the default") if value is MISSING and comma else value

    def look_up(wanted: str, key: str, depth: int) -> Any:
        if wanted.startswith("."):  # relative to the mapping of the key; each further dot goes up by one level
            steps = len(wanted) - len(wanted.lstrip("."))
            above = key.split(".")[:-steps]
            wanted = ".".join([*above, wanted.lstrip(".")])
        value = at(tree, wanted)
        if value is MISSING or value == "???":
            value = fallback(wanted)
        return value if value is MISSING else replace(value, wanted, depth + 1)

    def replace(node: Any, key: str, depth: int = 0) -> Any:
        if isinstance(node, dict):
            return {name: replace(value, f"{key}.{name}" if key else str(name), depth) for name, value in node.items()}
        if isinstance(node, list):
            return [replace(value, f"{key}.{number}", depth) for number, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node or depth > _DEEPEST:
            return node
        for _ in range(_DEEPEST):
            match = _INTERPOLATION.search(node)
            if match is None:
                return node
            value = value_of(match.group(1), key, depth)
            if value is MISSING:
                break
            if match.group(0) == node:
                return value
            node = node[: match.start()] + str(value) + node[match.end() :]
        if key not in left:
            left.append(key)
        return node

    return replace(tree, ""), left


def _parse(text: str, *, where: str) -> Any:
    return parse_yaml(text, where=where, error=ConfigError, loader=_Yaml)


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        mine = tree.get(key)
        if isinstance(mine, dict) and isinstance(value, Mapping):
            _merge(mine, value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _default(entry: Any) -> Iterator[tuple[str, str]]:
    """The file (without its suffix) and the package of an entry of a defaults list."""
    if isinstance(entry, str):
        target, _, package = entry.removeprefix("optional ").lstrip("/").partition("@")
        yield target, package or ".".join(target.split("/")[:-1])
    elif isinstance(entry, Mapping):
        for group, option in entry.items():
            group, _, package = (
                str(group).removeprefix("override ").removeprefix("optional ").lstrip("/").partition("@")
            )
            if option is not None:
                yield f"{group}/{option}", package or group.replace("/", ".")
    else:
        raise ConfigError(f"the defaults list has an entry {entry!r:.80}; an entry is a name or `group: name`")


def _package(path: Path, package: str) -> str:
    """The package under which a file's keys are put; a `# @package` comment in the file overrides it."""
    head = read_text(path, error=ConfigError)[:1000]
    comment = re.search(r"^#\s*@package\s+(\S+)", head, re.MULTILINE)
    if comment is None:
        return "" if package == "_global_" else package
    return {"_global_": "", "_group_": package}.get(comment.group(1), comment.group(1))


def _under(package: str, tree: dict[str, Any]) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        tree = {part: tree}
    return tree
