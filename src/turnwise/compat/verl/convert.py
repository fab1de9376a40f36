"""Converts verl's configuration, from a file or a shell script, into a recipe, with a report on every key.

Knows the keys about conversations, engines and devices; `convert_training` knows those about training, and the tables of `keys`
those that need no computation. Keys that are not given have verl's default if it differs from turnwise's; verl's own
configuration files (`ppo_trainer` and the files that it includes) contain these defaults, and are not read.

Scripts are never run. Of `python -m verl.trainer.main_ppo` in a script it reads variables and their defaults (`${NAME:-512}`,
`${1:-vllm}`), integer arithmetic, arrays, `$(pwd)` and the environment. A variable that neither the script nor the environment
sets, such as `$SLURM_JOB_NUM_NODES`, stays as a reference: `${NAME}`."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.chat.media_parts import has_media
from turnwise.chat.tool_calls import FORMATS
from turnwise.compat.conversion import (
    MISSING,
    ConversionReport,
    UnsupportedKey,
    at,
    compose,
    leaves,
    override,
    resolved,
)
from turnwise.compat.verl import convert_training
from turnwise.compat.verl.convert_teacher import convert_teacher
from turnwise.compat.verl.files import read_interactions, read_tools
from turnwise.compat.verl.helpers import GRADED
from turnwise.compat.verl.keys import (
    ACTOR,
    DEFAULTS,
    FIXED,
    HANDLED,
    PLAIN,
    REWARD_MANAGERS,
    ROLLOUT,
    TURNS,
    VerlRecipeBuilder,
    idle,
    machinery,
)
from turnwise.compat.verl.reward import CustomBatchScore, CustomScore, ground_truth
from turnwise.data.rows import records
from turnwise.errors import ConfigError, DataError, nearest
from turnwise.json_yaml import read_text
from turnwise.types import Message

_ENTRY = re.compile(r"(^|[./])main_ppo(\.py)?$")
_ASSIGNED = re.compile(r"(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[@\])?(?::?[-=]((?:[^{}]|\$\{\w+\})*))?\})")
_ARITHMETIC = re.compile(r"\$\(\(([^$`]*?)\)\)(?!\))")
_POSITIONAL_DEFAULT = re.compile(r"\$\{[0-9]+:?-([^{}]*)\}")
_IF_SET = re.compile(r"\$\{([A-Za-z_]\w*):?\+([^{}]*)\}")
_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_POSITIONAL = re.compile(r"\$(?:[@*#0-9]|\{[@*0-9][^{}]*\})")
_ENDS = re.compile(r"[|;&<>]|\d+>")
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class Script:
    """The arguments that a script passes to verl."""

    folder: str | None = None
    """`--config-path`."""
    name: str | None = None
    """`--config-name`."""
    overrides: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Words that only a shell could expand: a command's output, or a variable that the script does not set."""
    references: list[str] = field(default_factory=list)
    """Those of `unknown` that contain only variables, as `key=${NAME}`."""


def read_script(path: Path) -> Script:
    """The arguments of the command in a script that starts verl's trainer.

    Raises ConfigError if there is no such command, if there are several, or if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    variables: dict[str, list[str]] = {}
    commands: list[list[str]] = []
    for command in _commands(text):
        words = _words(command, variables)
        at = next((n for n, word in enumerate(words) if _ENTRY.search(word)), None)
        if at is not None:
            given = words[at + 1 :]
            commands.append(given[: next((n for n, word in enumerate(given) if _ENDS.match(word)), None)])
        elif (assigned := _ASSIGNED.fullmatch(command.strip())) is not None:
            name, more, value = assigned.groups()
            new = _words(value.strip()[1:-1] if value.startswith("(") else value, variables)
            new = new if value.startswith("(") else [" ".join(new)]
            variables[name] = [*variables.get(name, []), *new] if more else new
    if len(commands) != 1:
        raise ConfigError(f"{path} has {len(commands)} commands with verl.trainer.main_ppo; it must have one")
    return _script(commands[0])


def _script(words: list[str]) -> Script:
    script = Script()
    waiting = iter(words)
    for word in waiting:
        flag, equals, value = word.partition("=")
        if flag in ("--config-path", "-cp", "--config-dir", "-cd", "--config-name", "-cn"):
            value = value if equals else next(waiting, "")
            if "name" in flag or flag == "-cn":
                script.name = value
            else:
                script.folder = value
        elif not word.startswith("-") and word.strip():
            word = _REFERENCE.sub(lambda match: f"${{{match.group(1) or match.group(2)}}}", word)
            script.overrides.append(word)
            if re.search(r"\$[\w{(]|`", word):
                script.unknown.append(word)
                if not re.search(r"\$|`", _REFERENCE.sub("", word)):
                    script.references.append(word)
    return script


def _commands(text: str) -> Iterator[str]:
    """The commands of a script. A command continues after a backslash, and while a quotation or an array is open."""
    waiting = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            waiting += line.rstrip()[:-1] + " "
            continue
        waiting += line
        array = re.match(r"\s*(export\s+)?\w+\+?=\(", waiting)
        if _open(waiting) or (array is not None and _unclosed(waiting)):
            waiting += "\n"
            continue
        yield waiting
        waiting = ""
    if waiting and not _open(waiting):
        yield waiting


def _unclosed(text: str) -> bool:
    """Whether a bracket outside of quotations and comments is open: a line of an array may end with `$((a + b))`."""
    bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "", text)
    bare = re.sub(r"(^|\s)#.*", "", bare)
    return bare.count("(") > bare.count(")")


def _open(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _words(text: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a command, with known variables expanded."""
    text = text.replace("$(pwd)", os.getcwd()).replace("`pwd`", os.getcwd())
    text = _POSITIONAL_DEFAULT.sub(lambda match: match.group(1), text)
    text = _IF_SET.sub(lambda match: match.group(2) if any(_set(match.group(1), variables)) else "", text)
    while (match := _ARITHMETIC.search(text)) is not None:  # before splitting: the expression may contain blanks
        value = _number(match.group(1), variables)
        if value is None:
            break
        text = text[: match.start()] + str(value) + text[match.end() :]
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return []
    expanded: list[str] = []
    for word in words:
        reference = re.fullmatch(r"\$\{(\w+)\[@\]\}|\$(\w+)", word)
        several = variables.get(reference.group(1) or reference.group(2)) if reference is not None else None
        if several is not None:  # an array, or a text of several words
            array = reference is not None and reference.group(1) is not None
            expanded += several if array or len(several) != 1 else several[0].split()
        elif put := _POSITIONAL.sub("", _put(word, variables)):
            expanded.append(put)
    return expanded


def _set(name: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words of a variable of the script or of the environment; none if it is not set."""
    return variables.get(name) or list(filter(None, [os.environ.get(name)]))


def _put(word: str, variables: Mapping[str, list[str]]) -> str:
    """A word with its variables expanded; variables that are not set stay."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        known = " ".join(variables[name]) if name in variables else os.environ.get(name)
        return known if known else match.group(0) if match.group(3) is None else match.group(3)

    for _ in range(10):  # a default may contain another variable
        before, word = word, _VARIABLE.sub(value, word)
        if word == before:
            break
    return word


def _number(expression: str, variables: Mapping[str, list[str]]) -> int | None:
    """The result of integer arithmetic, or None for any other expression."""
    named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: _put(f"${match.group(1)}", variables), expression)

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        raise ValueError

    try:
        return of(ast.parse(named.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None


_FSDP = f"{ACTOR}.fsdp_config"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}
_TENSOR, _DATA = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.data_parallel_size"
_ONE_DEVICE = "the embedded engine uses one device; set engine.name=vllm and"
_SERVERS = ("vllm", "sglang")
_REASONS = {
    f"{_FSDP}.wrap_policy.min_num_params": "each layer is gathered as a unit",
    f"{_FSDP}.forward_prefetch": "torch's fully_shard gathers the next layer during the computation of a layer",
    _TENSOR: f"{_ONE_DEVICE} engine.tensor_parallel",
    _DATA: f"{_ONE_DEVICE} engine.data_parallel",
    f"{ROLLOUT}.pipeline_model_parallel_size": f"{_ONE_DEVICE} engine.arguments=[--pipeline-parallel-size, ...]",
}
_TOGETHER = {
    f"{ACTOR}.megatron.tensor_model_parallel_size": "tensor",
    f"{ACTOR}.ulysses_sequence_parallel_size": "context",
    f"{_FSDP}.ulysses_sequence_parallel_size": "context",
}
"""How many ranks compute a micro-batch together, and the name in `cluster.mesh`."""
_CARRIED = (
    _NODES,
    _GPUS,
    *_TOGETHER,
    f"{_FSDP}.param_offload",
    f"{_FSDP}.optimizer_offload",
    f"{_FSDP}.reshard_after_forward",
    f"{_FSDP}.mixed_precision.param_dtype",
    f"{_FSDP}.mixed_precision.reduce_dtype",
    f"{_FSDP}.fsdp_size",
)

PLACEMENT = (*_CARRIED, *_REASONS)
"""The keys that this module converts."""


def convert_placement(builder: VerlRecipeBuilder) -> None:
    """Set `cluster`: `local` on one machine, `torchrun` on several; one process for one GPU. Set `engine` if verl's servers use
    several GPUs each."""
    # several machines if their number is a variable of the scheduler: it is needed for the start only
    variable = builder.reference(_NODES)
    nodes = 2 if variable is not None else builder.count(_NODES) or 1
    gpus = builder.count(_GPUS) or 1
    _engine(builder, gpus)
    for key, reason in _REASONS.items():
        if key not in builder.converted:
            builder.reject(key, reason)
    if nodes * gpus == 1 or not (builder.is_set(_GPUS) or builder.is_set(_NODES)):
        builder.convert("nothing: one process is the default", _NODES, _GPUS)
        _in_one_process(builder)
        return
    if (optimizer := builder.get("train.optimizer.name", "adamw")) == "adafactor":
        reason = f"several ranks cannot train with train.optimizer.name={optimizer}: use adamw, and set cluster=local"
        for key in _CARRIED:
            builder.reject(key, reason)
        return
    if nodes == 1:
        builder.set("cluster.launcher", "local", _NODES, _GPUS)
        builder.set("cluster.trainers", gpus, _GPUS)
    else:
        builder.set("cluster.launcher", "torchrun", _NODES, _GPUS)
        machines = nodes if variable is None else variable
        start = f"torchrun --nnodes {machines} --nproc-per-node {gpus if builder.is_set(_GPUS) else 8} -m turnwise train RECIPE"
        builder.assume("cluster.launcher", "torchrun", f"start `{start}` on each machine (docs/deploy.md)")
    _fsdp(builder)
    _mesh(builder, None if variable is not None else nodes * gpus)


def _engine(builder: VerlRecipeBuilder, gpus: int) -> None:
    """Set `engine` to servers on several GPUs each, which the embedded engine cannot use. As in verl, they are on the GPUs of the
    trainer, and free their memory while it trains (`free_cache_engine`)."""
    name = builder.value(f"{ROLLOUT}.name")
    if name in _SERVERS and (variable := builder.reference(_TENSOR)) is not None:
        reason = f"the number of servers depends on {variable}: set engine.replicas, {gpus} GPUs divided by it"
        builder.assume("engine.replicas", 1, reason)
        _servers(builder, name, variable, builder.count(_DATA) or 1, 1)
        return
    tensor, data = builder.count(_TENSOR) or 1, builder.count(_DATA) or 1
    if tensor * data == 1:
        builder.convert("nothing: the embedded engine uses one device", _TENSOR, _DATA)
        return
    if name not in _SERVERS:
        return
    if gpus % (tensor * data):
        reason = f"a server needs {tensor} x {data} GPUs, and {_GPUS}={gpus}: set engine.name={name} and engine.tensor_parallel"
        for key in (_TENSOR, _DATA):
            builder.reject(key, reason)
        return
    _servers(builder, name, tensor, data, gpus // (tensor * data))


def _servers(builder: VerlRecipeBuilder, name: str, tensor: int | str, data: int, replicas: int) -> None:
    builder.set("engine.name", name, f"{ROLLOUT}.name")
    builder.set("engine.tensor_parallel", tensor, _TENSOR)
    builder.set("engine.data_parallel", data, _DATA)
    builder.set("engine.replicas", replicas, _GPUS)
    if builder.value(f"{ROLLOUT}.free_cache_engine") is not False:  # verl's default is true
        builder.set("engine.sleep", True, f"{ROLLOUT}.free_cache_engine")
    arguments = _arguments(builder, name)
    if arguments:
        builder.set("engine.arguments", arguments)
    reason = f"{name} must be installed (docs/engines.md); without it, use the embedded engine: engine={{name: local}}"
    builder.assume("engine.name", name, reason)


def _arguments(builder: VerlRecipeBuilder, name: str) -> list[str]:
    """The further arguments of the servers."""
    share, eager = f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.enforce_eager"
    arguments: list[str] = []
    if builder.is_set(share):
        flag = "--gpu-memory-utilization" if name == "vllm" else "--mem-fraction-static"
        arguments += [flag, f"{builder.number(share):g}"]
        builder.convert("engine.arguments", share)
    if builder.value(eager) is True:
        arguments.append("--enforce-eager" if name == "vllm" else "--disable-cuda-graph")
        builder.convert("engine.arguments", eager)
    return arguments


def _in_one_process(builder: VerlRecipeBuilder) -> None:
    """Without ranks, only the state of the optimizer can be offloaded."""
    key = f"{_FSDP}.optimizer_offload"
    if builder.value(key) is True and builder.get("model.device") != "cpu":
        # verl moves it between its phases; a server that keeps its memory would not use what is free meanwhile
        in_turns = builder.get("engine.name") is None or builder.get("engine.sleep")
        builder.set("train.optimizer.offload", "sampling" if in_turns else "cpu", key)
    for key in _CARRIED[2:]:
        if key not in builder.converted:
            builder.reject(key, "has no effect with one GPU: the model is not divided")


def _mesh(builder: VerlRecipeBuilder, ranks: int | None) -> None:
    """Set `cluster.mesh`. `ranks` is None if their number is not known here."""
    for key, name in _TOGETHER.items():
        size = builder.value(key)
        if isinstance(size, int) and size > 1 and (ranks is None or ranks % size == 0):
            if builder.get(f"cluster.mesh.{name}", None) is None:  # Ulysses' size may be named twice
                ranks = None if ranks is None else ranks // size
            builder.set(f"cluster.mesh.{name}", size, key)
        elif size == 1:
            builder.convert("nothing: each rank computes alone", key)
        elif size is not None:
            builder.reject(key, f"a divisor of {ranks} ranks is needed")
    key = f"{_FSDP}.fsdp_size"
    size = builder.value(key)
    if size is None:
        return
    if not isinstance(size, int) or size == 0:
        builder.reject(key, "a number of ranks, or -1, is needed")
    elif size < 0 or (ranks is not None and size >= ranks):
        builder.convert("nothing: the model is divided among all ranks", key)
    elif ranks is not None and ranks % size:
        builder.reject(key, f"{ranks} ranks cannot be arranged in groups of {size}")
    else:
        builder.set("cluster.mesh.shard", size, key)


def _fsdp(builder: VerlRecipeBuilder) -> None:
    """Set `cluster.fsdp`."""
    offload = [f"{_FSDP}.param_offload", f"{_FSDP}.optimizer_offload"]
    if any(builder.value(key) is True for key in offload):
        # verl moves each of them between its phases; here, all parts are in the CPU's memory, or none
        builder.set("cluster.fsdp.offload", "cpu", *offload)
    else:
        builder.convert("nothing: it is the default", *offload)
    key = f"{_FSDP}.reshard_after_forward"
    if isinstance(value := builder.value(key), bool):
        builder.set("cluster.fsdp.reshard_after_forward", value, key)
    dtypes = {name: builder.value(f"{_FSDP}.mixed_precision.{name}_dtype") for name in ("param", "reduce")}
    for name, value in dtypes.items():
        key, dtype = f"{_FSDP}.mixed_precision.{name}_dtype", _DTYPES.get(str(value))
        if value is None:
            continue
        if dtype is None:
            builder.reject(key, "bf16 and fp32 are supported", changes_training=True)
        elif name == "reduce":
            builder.set("cluster.fsdp.reduce_dtype", dtype, key)
        elif dtype == "float32" or builder.get("model.dtype", "float32") == dtype:
            builder.convert("nothing: it is the type of the weights (model.dtype)", key)
        else:
            builder.set("cluster.fsdp.param_dtype", dtype, key)


_PLACE = "turnwise.compat.verl"
_OWN_GRADER = (
    "For other rows, write `def compute_score(data_source, solution_str, ground_truth, extra_info)`, which returns a number, in "
    "a file, and convert with custom_reward_function.path=FILE; or name a function in reward.trajectory (docs/rewards.md)"
)
_VERL_FILES = ("ppo_trainer", "ppo_megatron_trainer")
_ONLY_FOR_START = ("trainer.nnodes",)
"""Keys that are not options of a recipe: the command that starts it has their values."""
_VERL_GROUPS = (
    "actor", "algorithm", "critic", "data", "engine", "model", "optim", "profiler", "ref", "reward_manager",
    "reward_model", "rollout",
)  # fmt: skip


def from_verl_arguments(
    overrides: Sequence[str] = (),
    *,
    folder: str | Path | None = None,
    name: str | None = None,
    try_names: bool = False,
) -> ConversionReport:
    """Convert the arguments of `python -m verl.trainer.main_ppo --config-path=FOLDER --config-name=NAME OVERRIDES`.

    Without a folder, only the overrides are converted. The first word may be one of verl's shell scripts, such as `run.sh`:
    its arguments come before the other overrides. With `try_names`, the classes and functions that the recipe names are loaded,
    and what cannot be loaded is reported. Raises ConfigError if the configuration cannot be read.
    """
    script, places = Script(), [Path()]
    if overrides and overrides[0].endswith(".sh") and "=" not in overrides[0]:
        file = Path(os.path.expanduser(overrides[0]))
        script = read_script(file)
        overrides = [*script.overrides, *overrides[1:]]
        folder, name = folder or script.folder, name or script.name
        places.append(file.parent)
    tree, note = _files(folder, name, places)
    _expand_multi_turn(tree)
    unread: list[UnsupportedKey] = []
    for word in overrides:
        try:
            override(tree, [word])
        except ConfigError:
            if word not in script.overrides or "=" not in word:
                raise
            key, value = _key(word), word.partition("=")[2]
            reason = "its value could not be read: set it in another way"
            unread.append(UnsupportedKey(key, value, machinery(key) or reason, changes_training=machinery(key) is None))
        _expand_multi_turn(tree)
    tree, unresolved = resolved(tree, lambda key: DEFAULTS.get(key, MISSING))
    kept = {_key(word) for word in script.references} & {re.sub(r"(\.\d+)+$", "", key) for key in unresolved}
    others = [key for key in unresolved if re.sub(r"(\.\d+)+$", "", key) not in kept]
    report = _Conversion(tree, others).report(try_names=try_names)
    if note is not None:
        report.assumptions.append(note)
    report.unsupported.extend(unread)
    _report_unknown(report, script, kept)
    return report


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _report_unknown(report: ConversionReport, script: Script, kept: Collection[str]) -> None:
    """Report the words of a script that only a shell could expand. `kept` are the keys whose values are variables.

    A variable that does not reach the recipe, although its key was converted, was compared with verl's values and lost.
    """
    recipe = str(report.recipe)
    rejected = {key.key for key in report.unsupported}
    for word in script.unknown:
        key, value = _key(word), word.partition("=")[2]
        variables = re.findall(r"\$\{\w+\}", value)
        if key in kept and all(variable in recipe for variable in variables):
            reason = "the variable is not set here, and the recipe refers to it: set it before you train"
        elif key in _ONLY_FOR_START and key in report.converted:
            continue
        elif key in kept and key in report.converted:
            reason = (
                "the value depends on a variable that is not set here: set the variable, or the key, and convert again"
            )
            del report.converted[key]
            report.unsupported.append(UnsupportedKey(key, value, reason, changes_training=True))
            continue
        elif key in rejected and key in kept:
            continue
        else:
            reason = "its value needs a shell: set the key, or the variable that it uses"
        report.assumptions.append(UnsupportedKey(key, value, reason))


def _files(
    folder: str | Path | None, name: str | None, places: Sequence[Path]
) -> tuple[dict[str, Any], UnsupportedKey | None]:
    """The configuration of `--config-path` and `--config-name`, and a note about how they were understood. Raises ConfigError.

    Hydra searches a relative folder beside verl's trainer, so `config` is verl's own folder unless one of `places` has such a
    folder with the file. verl's own files contain the defaults that are known here, and are not read.
    """
    name = (name or "").removesuffix(".yaml")
    if folder is None:
        if name and name not in _VERL_FILES:
            raise ConfigError(f"--config-name={name} needs --config-path, the directory of {name}.yaml")
        return {}, None
    path = Path(os.path.expanduser(folder))
    found = [place / path for place in places if os.path.isdir(place / path)]
    if found and (name not in _VERL_FILES or os.path.isfile(found[0] / f"{name}.yaml")):
        path = next((one for one in found if os.path.isfile(one / f"{name}.yaml")), found[0])
        return compose(path, name or _VERL_FILES[0], leaving_out=_is_verl_file), None
    if name in _VERL_FILES or (not name and path == Path("config")):
        reason = "there is no such file here, so it is verl's own configuration, whose defaults are used"
        return {}, UnsupportedKey("--config-path", str(folder), reason)
    where = " or ".join(str((place / path).absolute()) for place in places)
    raise ConfigError(f"--config-path: there is no directory {where}")


def _is_verl_file(target: str) -> bool:
    return target in _VERL_FILES or target.split("/")[0] in _VERL_GROUPS


def _expand_multi_turn(tree: dict[str, Any]) -> None:
    """`multi_turn: True` is `multi_turn.enable: True`."""
    rollout = at(tree, ROLLOUT)
    if isinstance(at(rollout, "multi_turn"), bool):
        rollout["multi_turn"] = {"enable": rollout["multi_turn"]}


def _messages(prompt: Any) -> list[Message]:
    return [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []


class _Conversion:
    """Converts one configuration tree, one part of the recipe after the other."""

    def __init__(self, tree: dict[str, Any], unresolved: Sequence[str]) -> None:
        self._tree = tree
        self._given = dict(leaves(tree))
        self._builder = VerlRecipeBuilder(tree, DEFAULTS)
        self._unresolved = unresolved
        self._rows: Sequence[Mapping[str, Any]] | None = None
        """The rows of data.train_files; None if they cannot be read here."""

    def report(self, *, try_names: bool) -> ConversionReport:
        """Convert everything."""
        for key in self._unresolved:
            if machinery(key) is None:
                self._builder.reject(
                    key, "it refers to a key or a variable that does not exist: set it", changes_training=True
                )
        self._fixed()
        for key, option in PLAIN.items():
            if (value := self._builder.value(key)) is not None:
                self._builder.set(option, value, key)
        self._model()
        self._data()
        interactive = self._conversation()
        convert_training.lengths(self._builder)
        convert_training.optimization(self._builder)
        convert_training.adapter(self._builder)
        convert_training.trainer(self._builder, convert_training.steps(self._builder, self._count()))
        convert_placement(self._builder)
        self._reward(interactive)
        convert_teacher(self._builder)
        self._others()
        if try_names:
            self._try_names()
        self._builder.keep_float32()
        return self._builder.report()

    def _try_names(self) -> None:
        """Load the classes of the interaction and tool files, and the reward functions. MCP servers are not started."""
        arguments = self._arguments()
        for kind, read in (
            ("interactions", read_interactions),
            ("tools", lambda file: read_tools(file, timeout=30.0)),
        ):
            file = arguments.get(kind)
            if file is None or (os.path.isfile(file) and "mcp" in read_text(Path(file), error=ConfigError)):
                continue
            option = f"environment.arguments.{kind}"
            self._builder.try_name(option, file, lambda read=read, file=file: read(file), files=[file])
        for form, make in (("trajectory", CustomScore), ("batch", CustomBatchScore)):
            for number, use in enumerate(self._builder.get(f"reward.{form}", [])):
                if (given := use.get("arguments")) is not None:
                    self._builder.try_name(
                        f"reward.{form}.{number}",
                        given["path"],
                        lambda make=make, given=given: make(**given),
                        files=[given["path"]],
                    )

    def _fixed(self) -> None:
        for key, (values, reason) in FIXED.items():
            value = at(self._tree, key)
            if value is MISSING:
                continue
            if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in values):
                self._builder.convert("nothing: turnwise always works this way", key)
            else:
                self._builder.reject(key, reason, changes_training=True)

    def _model(self) -> None:
        key = "actor_rollout_ref.model.path"
        if self._builder.is_set(key):
            self._builder.set("model.path", os.path.expanduser(str(self._builder.value(key))), key)
        else:
            self._builder.reject(key, "name the model", changes_training=True, even_default=True)

    def _data(self) -> None:
        for key, option in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
            value = self._builder.value(key)
            files = list(map(str, value if isinstance(value, list) else [] if value is None else [value]))
            if files:
                self._builder.set(option, files[0] if len(files) == 1 else files, key)
                if option == "data.train":
                    self._read(files)
            elif option == "data.train":
                self._builder.reject(key, "name the file of the rows", changes_training=True, even_default=True)
        for key, ours in (("data.prompt_key", "prompt"), ("data.image_key", "images"), ("data.video_key", "videos")):
            if self._builder.value(key) not in (None, ours):
                self._builder.set(f"data.columns.{ours}", self._builder.value(key), key)
            self._builder.convert(f"the column {ours}", key)
        source = self._builder.value("data.reward_fn_key")
        if source != "data_source":
            self._builder.set("data.columns.data_source", source, "data.reward_fn_key")
        self._builder.convert("the column data_source", "data.reward_fn_key")
        key = "data.apply_chat_template_kwargs"
        if arguments := self._builder.value(key):
            self._builder.set("model.chat_template_kwargs", arguments, key)
        self._builder.convert("no arguments of the chat template", key)
        self._builder.convert("rows are always conversations", "data.return_raw_chat")
        if (most := self._builder.count("data.train_max_samples")) is not None:
            self._builder.set("data.max_rows", most, "data.train_max_samples")
        self._builder.convert("all rows", "data.train_max_samples")
        key = "data.filter_overlong_prompts"
        if self._builder.value(key) is True and (longest := self._builder.count("data.max_prompt_length")) is not None:
            self._builder.set("data.max_prompt_tokens", longest, key)
        self._builder.convert("no row is left out", key)

    def _conversation(self) -> bool:
        """Set the environment and the number of turns. Returns whether there is an interaction."""
        interaction, tools = self._file("interaction"), self._file("tool")
        more = self._agents()
        switch = f"{TURNS}.enable"
        on = at(self._tree, switch)
        many = self._multiturn() or on is True or (on is not False and bool(interaction or tools or more))
        if on is False and (interaction or tools):
            self._builder.reject(
                switch, "it contradicts the interaction or tool file: remove one of the two", changes_training=True
            )
        self._builder.convert("limits.turns", switch)
        max_user_turns = self._user_turns(bool(interaction), bool(tools or more))
        arguments = {"interactions": interaction, "tools": tools, "max_user_turns": max_user_turns, **more}
        if interaction or tools or more:
            given = {name: value for name, value in arguments.items() if value is not None}
            self._builder.set("environment", {"use": f"{_PLACE}:Conversations", "arguments": given})
        self._tool_calls(bool(tools or "function_tools" in more) or "tools" in self._builder.recipe)
        self._turns(many)
        return bool(interaction)

    def _agents(self) -> dict[str, Any]:
        """The arguments for agent loops and for functions that are tools."""
        key, loops_key, default_key = (
            f"{TURNS}.function_tool_path",
            f"{ROLLOUT}.agent.agent_loop_config_path",
            f"{ROLLOUT}.agent.default_agent_loop",
        )
        loops, default = self._builder.value(loops_key), self._builder.value(default_key)
        if loops is None and default not in (None, "single_turn_agent", "tool_agent"):
            self._builder.reject(default_key, f"name the file of its class: {loops_key}", changes_training=True)
            default = None
        found = {"function_tools": self._builder.value(key), "agent_loops": loops}
        found = {name: value for name, value in found.items() if value is not None}
        # without loops, rows without `agent_name` use the tools, as in verl's SGLang loop
        named = default if default is not None or loops is None else "single_turn_agent"
        if named is not None and (found or self._builder.is_set(f"{TURNS}.tool_config_path")):
            found["default_agent"] = named
        turns = at(self._tree, TURNS)
        if loops is not None and isinstance(turns, Mapping):
            found["config"] = {"actor_rollout_ref": {"rollout": {"multi_turn": dict(turns)}}}
        self._builder.convert("environment", key, loops_key, default_key)
        return found

    def _file(self, kind: str) -> str | None:
        """The interaction file or the tool file. verl's versions have different keys for them."""
        old = "interaction_config_file" if kind == "interaction" else "tool_kwargs.tools_config_file"
        keys = [
            f"{TURNS}.{kind}_config_path",
            f"{ROLLOUT}.{old}",
            *(["data.tool_config_path"] if kind == "tool" else []),
        ]
        named = {str(self._builder.value(key)): key for key in keys if self._builder.is_set(key)}
        if len(named) > 1:
            for key in list(named.values())[1:]:
                self._builder.reject(key, f"{keys[0]} names another file: remove one of the two", changes_training=True)
        self._builder.convert("environment", *keys)
        return next(iter(named), None)

    def _user_turns(self, interactive: bool, tools: bool) -> int | None:
        key = f"{TURNS}.max_user_turns"
        most = self._builder.count(key)
        if most is not None and tools and not interactive:  # since v0.7 it limits the rounds of tool calls
            self._builder.convert("limits.turns: these rounds of tool calls, and a last turn", key)
            return None
        if most is not None and not interactive:
            self._builder.reject(
                key,
                "it counts the answers of an interaction, and there is none: set max_assistant_turns",
                changes_training=True,
            )
            return None
        self._builder.convert("environment.arguments.max_user_turns", key)
        return most

    def _turns(self, many: bool) -> None:
        key, other = f"{TURNS}.max_assistant_turns", "rollout.multiturn.max_turns"
        most = self._builder.count(key) or self._builder.count(other)
        rounds = self._builder.count(f"{TURNS}.max_user_turns")
        if many and rounds is not None and "max_user_turns" not in self._arguments():
            most = min(rounds + 1, most or rounds + 1)
        if many and most is None:  # the limit that verl uses if no limit is set
            lengths = [self._builder.count(f"data.max_{name}_length") or 0 for name in ("prompt", "response")]
            most = max(1, sum(lengths) // 3)
        if not many and self._builder.is_set(key):
            self._builder.reject(key, "multi_turn is off, so a conversation has one turn", changes_training=True)
        self._builder.set("limits.turns", most if many else 1, key, other)

    def _arguments(self) -> dict[str, Any]:
        """`environment.arguments` in the recipe built so far."""
        return self._builder.recipe.get("environment", {}).get("arguments", {})

    def _tool_calls(self, tools: bool) -> None:
        options = ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
        for name in options:
            if not tools:
                self._builder.reject(f"{TURNS}.{name}", "there are no tools")
            elif self._builder.value(f"{TURNS}.{name}") is not None:
                self._builder.set(f"tool_calls.{name}", self._builder.value(f"{TURNS}.{name}"), f"{TURNS}.{name}")
        key = f"{TURNS}.format"
        named = self._builder.value(key)
        names = [format.name for format in FORMATS]
        if named in names and tools:
            self._builder.set("tool_format", named, key)
        elif self._builder.is_set(key):
            self._builder.reject(
                key, f"the format is taken from the chat template (tool_format may be: {', '.join(names)})"
            )

    def _multiturn(self) -> bool:
        """Convert `rollout.multiturn`, a block of an older description of verl. Returns whether it switches turns on."""
        place = "rollout.multiturn"
        if at(self._tree, place) is MISSING:
            return False
        if self._builder.is_set(f"{place}.stop_tokens"):
            self._builder.set("sampling.stop", self._builder.value(f"{place}.stop_tokens"), f"{place}.stop_tokens")
        kind = f"{place}.environment.type"
        if self._builder.is_set(kind) and self._builder.value(kind) != "tool_calling":
            self._builder.reject(
                kind,
                "only tool_calling is supported; write any other as an environment (README)",
                changes_training=True,
            )
        self._builder.convert("tools", kind)
        key = f"{place}.environment.tools"
        tools: list[dict[str, Any]] = []
        given = self._builder.value(key) or []
        for tool in given if isinstance(given, list) else [given]:
            uses = {
                "sandbox": ("turnwise.environments.sandbox.fusion:SandboxFusion", "url"),
                "api": ("turnwise.environments.search:Search", "retrieval_service_url"),
            }
            known = set(tool) == {"name", "type", "endpoint"} if isinstance(tool, dict) else False
            if not known or tool["type"] not in uses:
                self._builder.reject(
                    key, f"{tool!r:.100} must have name, endpoint and type: sandbox or api", changes_training=True
                )
                continue
            use, option = uses[tool["type"]]
            tools.append({"use": use, "arguments": {option: tool["endpoint"]}})
        if tools:
            self._builder.set("tools", tools)
            self._builder.convert("tools, under their names here (code_interpreter, search)", key)
        on = self._builder.value(f"{place}.enabled") is not False
        self._builder.convert("limits.turns", f"{place}.enabled")
        return on

    def _read(self, files: Sequence[str]) -> None:
        """Read the rows if the files are on this machine."""
        if not all(os.path.exists(os.path.expanduser(file)) for file in files):
            return
        try:
            self._rows = [row.record for file in files for row in records(file, split="train", subset=None)]
        except DataError:
            return
        image, video, prompt = (self._builder.value(f"data.{name}_key") for name in ("image", "video", "prompt"))
        has_images = any(
            row.get(image or "images") or row.get(video or "videos") or has_media(_messages(row.get(prompt)))
            for row in self._rows
        )
        key = "data.return_multi_modal_inputs"
        if not has_images and self._builder.is_set(key):
            del self._builder.recipe["data"]["return_multi_modal_inputs"]
            self._builder.reject(key, "no row contains an image; results of tools are never in the rows")

    def _count(self) -> int | None:
        """The number of rows to train on; None if they cannot be read here."""
        most = self._builder.count("data.train_max_samples")
        return None if self._rows is None else len(self._rows[:most])

    def _reward(self, interactive: bool) -> None:
        """Set the rewards: the user's function, or the rewards of the interaction, or verl's grader for the data source."""
        old, new = "custom_reward_function", "reward.custom_reward_function"  # the latter since v0.8
        place = new if self._builder.is_set(f"{new}.path") else old
        if place == new and self._builder.is_set(f"{old}.path"):
            self._builder.reject(
                f"{old}.path", f"{new}.path names another function: remove one of the two", changes_training=True
            )
        for part in ("path", "name", "reward_kwargs"):
            self._builder.reject(f"{old if place == new else new}.{part}", "it has no effect without a path")
        path, name, given = (f"{place}.{part}" for part in ("path", "name", "reward_kwargs"))
        if self._arguments() and (self._builder.is_set(path) or not interactive):
            # verl's trainer only records the rewards of tools and interactions; it trains on the reward function alone
            self._arguments()["rewards"] = "record"
        if self._builder.is_set(path):
            arguments = {"path": self._builder.value(path), "name": self._builder.value(name) or "compute_score"}
            if self._builder.is_set(given):
                arguments["arguments"] = self._builder.value(given)
            batch = any(self._builder.value(key) == "batch" for key in REWARD_MANAGERS)
            form, kind = ("batch", "CustomBatchScore") if batch else ("trajectory", "CustomScore")
            self._builder.set(
                f"reward.{form}", [{"use": f"{_PLACE}:{kind}", "arguments": arguments}], path, name, given
            )
            if without := sum(ground_truth(row) is None for row in self._rows or ()):
                reason = f"{without} rows have no reward_model.ground_truth, which verl gives to the function: they would fail"
                self._builder.failing.append(UnsupportedKey(f"reward.{form}", arguments["path"], reason))
            return
        for key in (name, given):
            self._builder.reject(key, f"it has no effect without {path}")
        self._builder.convert("the rewards of the conversation itself", path)
        if interactive:
            reason = (
                "the rewards of the interaction and its tools are used here. verl's trainer only records them, and grades the "
                "complete response by data_source. For that, set environment.arguments.rewards=record and a function in "
                "reward.trajectory"
            )
            self._builder.assume(path, None, reason)
            return
        self._grader(path)

    def _grader(self, path: str) -> None:
        """Set verl's grader of the rows' data source, unless it could grade none of them."""
        column, option = self._builder.value("data.reward_fn_key"), "reward.trajectory"
        use = [{"use": f"{_PLACE}:data_source_score"}]
        needed = (
            f"the grader of verl needs the columns {column} ({', '.join(GRADED)}) and reward_model, with ground_truth"
        )
        if self._rows is None:
            self._builder.set(option, use)
            self._builder.assume(path, None, f"{needed}; the rows are not here, so this was not checked. {_OWN_GRADER}")
            return
        named = {row.get(column) for row in self._rows}
        problems = list[str]()
        if unknown := sorted({str(name) for name in named - {None}} - set(GRADED)):
            problems.append(f"there is no grader for {', '.join(map(repr, unknown))} here")
        if None in named:
            problems.append(f"rows have no column {column}, by which verl chooses the grader")
        if any(ground_truth(row) is None for row in self._rows):
            problems.append("rows have no reward_model.ground_truth")
        if any(row.get(column) in GRADED and ground_truth(row) is not None for row in self._rows):
            self._builder.set(option, use)
        if problems:
            reason = f"{' and '.join(problems)}: {needed}. {_OWN_GRADER}"
            self._builder.reject(path, reason, changes_training=True, even_default=True)

    def _others(self) -> None:
        """Record every key that has not been processed yet."""
        done = {*self._builder.converted, *(left.key for left in self._builder.unsupported)}
        known = [*PLAIN, *HANDLED, *PLACEMENT, *FIXED]
        critic = self._builder.get("credit.name") == "gae"
        for key, value in self._given.items():
            if any(key == other or key.startswith(f"{other}.") for other in done):
                continue
            if key in (*PLAIN, *HANDLED, *PLACEMENT) and value is None:
                self._builder.convert("nothing: it is not set", key)
            elif (reason := idle(key, critic=critic) or machinery(key)) is not None:
                self._builder.reject(key, reason)
            elif value in (None, {}, []):
                self._builder.reject(key, "it is not set")
            else:
                self._builder.reject(
                    key, f"turnwise knows no such key of verl's{nearest(key, known)}", changes_training=True
                )
