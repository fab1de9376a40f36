"""Reads a recipe: one YAML file, environment variables, and the dotted overrides of the command line.

`load` applies overrides, inserts environment variables (`${NAME}`, `${NAME:-default}`), and validates the result against the
schema. The error lists all problems, with the most similar name for each unknown key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from turnwise.config.data import LoraSection
from turnwise.config.environment_values import insert_values
from turnwise.config.known_names import called_here, value_hint
from turnwise.config.named_section import name_of, named_sections, shared_options
from turnwise.config.resume_rules import RULES
from turnwise.config.schema import Config, Section
from turnwise.errors import ConfigError, nearest, without_hidden
from turnwise.json_yaml import parse_yaml, read_text
from turnwise.local_paths import no_file

__all__ = ["checked", "load", "schema_problems", "with_overrides"]

_NAMED = named_sections(Config)
"""For each section that is chosen by name: its class for each name."""
_SHORT = {
    "environment": "use",
    "loss_mask": "use",
    "cluster": "launcher",
    "model": "path",
    "train.optimizer": "name",
    "sft.optimizer": "name",
    **dict.fromkeys(_NAMED, "name"),
}
"""For each section that may be a text: the option that the text is."""

_OTHER_SYSTEMS = {
    "verl": (
        {"actor_rollout_ref"},
        {"algorithm", "trainer", "custom_reward_function", "reward_model", "hydra"},
        "To make a recipe from it: `turnwise convert --config-path <its directory> --config-name <its name without .yaml> --out "
        "recipe.yaml` (docs/verl.md)",
    ),
    "ms-swift": (
        {"rlhf_type"},
        {"tuner_type", "train_type", "vllm_mode", "multi_turn_scheduler", "external_plugins", "num_generations"},
        "To make a recipe from it: `turnwise convert --from swift <the file> --out recipe.yaml` (docs/swift.md)",
    ),
}
"""For each other system: a key that only its files have at their top, further keys, and what to do with such a file."""

_LENGTHS = {
    name: other
    for part in ("train", "sft")
    for name, other in ((f"{part}.steps", f"{part}.epochs"), (f"{part}.epochs", f"{part}.steps"))
}
"""The two options that say how long a run is: one of them on the command line replaces the other in the recipe."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Read a recipe, apply overrides (`train.lr=1e-4`), and check it. Returns the recipe and notes for the user.

    Raises ConfigError.
    """
    path = Path(path)
    if (problem := no_file(path, "recipe")) is not None:
        raise ConfigError(f"{problem}; recipes are YAML files, such as recipes/calculator.yaml")
    tree = parse_yaml(read_text(path, error=ConfigError), where=str(path), error=ConfigError)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must contain a mapping of options; it contains a {type(tree).__name__}")
    notes = _override(tree, overrides)
    inserted, origins = insert_values(tree, where=str(path))
    return checked(inserted, source=str(path)).with_origins(origins), notes


def with_overrides(tree: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> tuple[Config, list[str]]:
    """A recipe that was made by a program, with overrides (`engine.python=...`). Returns the recipe and notes for the user.

    Raises ConfigError.
    """
    changed = copy.deepcopy(dict(tree))
    notes = _override(changed, overrides)
    return checked(changed, source=source), notes


def checked(tree: Mapping[str, Any], *, source: str) -> Config:
    """The recipe for a tree of options. `source` is the origin that error messages name.

    Raises ConfigError.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(without_hidden(_explain(error, source))) from None


def schema_problems(tree: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """The options of a tree whose values are wrong: the option, the value and the rule. Options that are missing do not count.

    The option is empty for a rule about several options.
    """
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        problems = [problem for problem in error.errors(include_url=False) if problem["type"] != "missing"]
        named = {".".join(map(str, _keys(problem["loc"]))): problem for problem in problems}
        return [(option, problem["input"], problem["msg"].lower()) for option, problem in named.items()]
    return []


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Put `a.b=value` into the tree; values are YAML. A new `name` removes the section's options that belong to the old name."""
    notes: list[str] = []
    # names first: the other options on the command line belong to the new name
    for override in sorted(overrides, key=lambda override: not _chooses(override.partition("=")[0])):
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not an override; write key=value, for example train.lr=1e-4")
        value = parse_yaml(text, where=f"{override!r}: the value", error=ConfigError)
        if key in _NAMED and isinstance(value, str):  # `credit=rloo` is `credit.name=rloo`
            key = f"{key}.name"
        *parents, last = key.split(".")
        if not all([*parents, last]):
            raise ConfigError(f"{override!r}: {key!r} contains an empty name; write one dot between two names")
        node: dict[str, Any] = tree
        for depth, parent in enumerate(parents):
            child = node.setdefault(parent, {})
            if isinstance(child, str) and (key_of_text := _SHORT.get(".".join(parents[: depth + 1]))) is not None:
                child = node[parent] = {key_of_text: child}
            elif child is True and parents[: depth + 1] == ["model", "lora"]:
                child = node[parent] = LoraSection.model_validate(child).model_dump(include={"rank"})
            if not isinstance(child, dict):
                raise ConfigError(f"{override!r}: {'.'.join(parents[: depth + 1])} is not a mapping of options")
            node = child
        if key == "data.eval" and value is None:
            notes += _without_held_out_rows(tree, overrides)
        if value is not None and (other := _LENGTHS.get(key)) is not None:
            notes += _without_other_length(node, key, other, overrides)
        if last == "name" and len(parents) == 1 and parents[0] in _NAMED:
            notes += _rename(node, parents[0], value, override)
        node[last] = value
    return notes


def _chooses(key: str) -> bool:
    """Whether an override of this option says which other options there are."""
    return key.endswith(".name") or key in _NAMED


def _rename(node: dict[str, Any], section: str, name: Any, override: str) -> list[str]:
    """Remove the options that belong to the section's old name and not to its new name. Returns a note that lists them."""
    classes = _NAMED[section]
    former = node.get("name", next(iter(classes)))
    if former == name or not isinstance(name, str):  # another type is refused with the recipe
        return []
    shared = shared_options(classes[former], classes[name]) if former in classes and name in classes else set()
    dropped = [option for option in node if option != "name" and option not in shared]
    for option in dropped:
        del node[option]
    if not dropped:
        return []
    options = ", ".join(f"{section}.{option}" for option in dropped)
    return [f"{override} removes the recipe's {options}, which belonged to {former!r}"]


def _without_other_length(node: dict[str, Any], key: str, other: str, overrides: Sequence[str]) -> list[str]:
    """Remove the recipe's other option that says how long a run is, unless it is on the command line too. Returns a note."""
    section, _, name = other.partition(".")
    if node.get(name) is None or any(override.partition("=")[0] == other for override in overrides):
        return []
    return [f"{key} replaces the recipe's {section}.{name}={node.pop(name)}"]


def _without_held_out_rows(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Remove the recipe's options of evaluation that are not on the command line. Returns a note that lists them."""
    overridden = [override.partition("=")[0] for override in overrides]
    dropped: list[str] = []
    for section, options in (("eval", None), ("data", ["eval_split"])):
        node = tree.get(section)
        if not isinstance(node, dict):
            continue
        for option in list(options or node):
            name = f"{section}.{option}"
            if option in node and not any(f"{key}.".startswith(f"{name}.") for key in overridden):
                del node[option]
                dropped.append(name)
    if not dropped:
        return []
    return [f"data.eval=null removes the recipe's {', '.join(dropped)}, which need held-out rows"]


def _explain(error: ValidationError, source: str) -> str:
    """All problems, one per line: the key, the rule, the value, the most similar name."""
    lines: list[str] = []
    unknown = {str(problem["loc"][0]) for problem in error.errors() if problem["type"] == "extra_forbidden"}
    for system, (certain, usual, how) in _OTHER_SYSTEMS.items():
        found = unknown & (certain | usual)
        if unknown & certain or len(found) > 1:
            return f"{source} is a configuration of {system} (it has {', '.join(sorted(found))}), not a recipe. {how}"
    for problem in error.errors(include_url=False):
        # pydantic adds the branch of a union to the location: `list[...]`, `function-after[...]`, `local`
        branch = str(problem["loc"][-1]) if problem["loc"] else ""
        if branch.startswith("list[") and not isinstance(problem["input"], list):
            continue  # not a list, where a text or a list is allowed: the problem of the other branch is reported
        if branch.startswith("function-after[") and isinstance(problem["input"], list):
            continue
        key = ".".join(str(step) for step in _keys(problem["loc"]))
        if problem["type"] == "extra_forbidden":
            path = [*_keys(problem["loc"][:-1]), problem["loc"][-1]]
            lines.append(_unknown(problem["loc"], path, problem["input"]))
        elif problem["type"] == "missing":
            lines.append(f"{key} is missing: add it to the recipe")
        elif problem["type"] == "union_tag_invalid":
            tag = problem.get("ctx", {}).get("tag")
            hint = value_hint(f"{key}.name", str(tag))
            lines.append(f"{key}.name: there is no {key} {tag!r}{hint}; there are: {', '.join(_NAMED[key])}")
        elif problem["type"] == "union_tag_not_found":
            example = f"{{name: {next(iter(_NAMED[key]))}}}"
            lines.append(f"{key} must be a mapping of options, such as {example}; got {problem['input']!r:.200}")
        else:
            lines.append(f"{key}: {problem['msg'].lower()}; got {problem['input']!r:.200}")
    return f"{source}: " + "\n".join(lines)


def _keys(location: Sequence[Any]) -> list[Any]:
    """The keys of the recipe in a location, without the branches of unions that pydantic adds."""
    return [step for step in _without_names(location) if "[" not in str(step)]


def _unknown(location: Sequence[Any], path: Sequence[Any], value: Any) -> str:
    """The message for an unknown key and its value. `path` are the keys of the recipe that lead to it, the unknown key last."""
    section, key = _section_at(location[:-1]), ".".join(str(step) for step in path)
    names = list(section.model_fields) if section is not None else []
    name = str(path[-1])
    parents = ".".join(str(key) for key in path[:-1])
    others = [other for other, cls in _NAMED.get(parents, {}).items() if name in cls.model_fields]
    if section is not None and others:
        return (
            f"{key} has no effect with {parents}.name={name_of(section)}: it is an option of another {parents} "
            f"({', '.join(others)})"
        )
    hint = (
        called_here(name, value=value, section=parents, options=frozenset(names))
        or _in_other_sections(name)
        or nearest(name, names)
    )
    return f"there is no option {key}{hint}" + ("" if hint else f"; the options are: {', '.join(names)}")


def _in_other_sections(name: str) -> str:
    """A hint where the option stands in another section: `; temperature is an option of sampling: sampling.temperature`."""
    found = [option for option in RULES if option.rpartition(".")[2] == name and "[" not in option]
    found.sort(key=lambda option: not option.startswith("train."))
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _without_names(location: Sequence[Any]) -> list[Any]:
    """A location without the name that pydantic adds for a section that is chosen by name: `loss.ppo_clip.clip_low`."""
    named = len(location) > 1 and location[1] in _NAMED.get(str(location[0]), {})
    return [location[0], *location[2:]] if named else list(location)


def _section_at(location: Sequence[Any]) -> type[Section] | None:
    """The section of the schema for a location in the recipe."""
    section: type[Section] | None = Config
    if len(location) > 1 and (named := _NAMED.get(str(location[0]), {}).get(str(location[1]))) is not None:
        section, location = named, location[2:]
    for step in location:
        if section is None or isinstance(step, int):
            continue
        field = section.model_fields.get(str(step))
        section = next(_sections(field.annotation), None) if field is not None else None
    return section


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)
