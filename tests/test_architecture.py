"""The house: who may know whom. The arrows of docs/architecture.md, read off the imports themselves, nested ones included."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import turnwise

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "turnwise"
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "mcp", "vllm", "sglang", "ray"}

MAY_IMPORT: dict[str, set[str]] = {
    # the parts and modules of turnwise that a part may import, besides its own folder
    "types": set(),
    "errors": {"types"},
    "json_yaml": {"errors"},
    "options": {"errors", "json_yaml"},
    "local_paths": {"errors"},
    "library_messages": set(),
    "user_code": {"types", "errors", "local_paths", "library_messages"},
    "models": {"types", "errors", "local_paths", "options", "library_messages"},
    "data": {
        "types",
        "errors",
        "json_yaml",
        "local_paths",
        "user_code.copies",
        "user_code.references",
        "user_code.reward_number",
    },
    "recipe": {"errors", "config", "options", "user_code.references"},
    "chat": {"types", "errors", "local_paths", "data.images", "models.grammar"},
    "engines": {"types", "errors", "user_code", "models", "options"},
    "services": {"types", "errors", "user_code", "options"},
    "environments": {
        "types",
        "errors",
        "user_code",
        "services",
        "json_yaml",
        "data.numeric_answers",
        "services.http_server",
    },
    "rollout": {
        "types",
        "errors",
        "options",
        "json_yaml",
        "user_code",
        "chat",
        "engines.engine",
        "environments.environment",
        "environments.tools.toolbox",  # an agent that an environment opens may have tools
        "services",
        "rewards",  # the pipeline scores groups when they end
        "data.order",
    },
    "rewards": {"types", "errors", "user_code", "services", "options"},
    "training": {
        "types",
        "errors",
        "models",
        "json_yaml",
        "local_paths",
        "options",
        "user_code.algorithms",
        "library_messages",
        "version",
    },
    "config": {
        "errors",
        "options",
        "data.rows",
        "json_yaml",
        "local_paths",
        "models.gguf",
        "models.device",
        "user_code.algorithms",  # what a user's estimator or loss declares that it needs
    },
    "record": {"types", "errors", "config", "options", "data.images", "json_yaml", "user_code.reward_number"},
    "terminal": {"types", "errors", "config", "options", "record", "json_yaml", "local_paths"},
    "view": {"types", "errors", "record", "json_yaml", "services.http_server"},
    "loggers": {"types", "errors", "record.metrics"},
    "starter": {"errors"},
    "compat": {
        "types",
        "errors",
        "json_yaml",
        "user_code",
        "data",
        "chat",
        "engines",
        "environments",
        "rollout",
        "rewards",
        "services",
        "config.recipe",  # names of other systems' options
    },
    "rollout_server": {
        "types",
        "errors",
        "config",
        "options",
        "chat",
        "data.images",
        "data.rows",
        "engines.engine",
        "engines.remote",
        "engines.vllm.worker",
        "rollout",
        "record",
        "compat.swift",
        "services.http_server",
        "version",
    },
    "ray_workers": {
        "types",
        "errors",
        "data",
        "chat.media",
        "chat.media_parts",
        "chat.renderer",
        "engines.engine",
        "engines.remote",
        "rollout",
        "rollout_server",
        "options",
    },
    "assembly": {
        "types",
        "errors",
        "local_paths",
        "rollout_server",
        "ray_workers",
        "version",
        "services",
        "json_yaml",
        "user_code",
        "config",
        "options",
        "data",
        "chat",
        "compat.providers.provider",  # names of environments of other libraries
        "engines",
        "environments",
        "loggers",
        "rollout",
        "rewards",
        "training",
        "models",
    },
    "runs": {
        "loggers",
        "types",
        "errors",
        "local_paths",
        "assembly",
        "chat",
        "config",
        "options",
        "data",
        "doctor.fit",
        "doctor.memory",
        "doctor.template",
        "planning.memory",
        "engines",
        "json_yaml",
        "models",
        "record",
        "rewards",
        "rollout",
        "services",
        "rollout_server",
        "ray_workers",
        "terminal",
        "training",
        "user_code.calls",  # a replay answers by the conversation that asks
        "user_code.reward_number",
        "user_code.references",
    },
}
"""Parts that are missing here put the others together: train, sft, doctor, commands, cli."""

LIGHT = [
    "types",
    "errors",
    "json_yaml",
    "local_paths",
    "user_code",
    "chat",
    "services",
    "environments",
    "rollout",
    "rewards",
    "config",
    "options",
    "record",
    "terminal",
    "view",
    "loggers",
    "starter",
    "compat",
    "rollout_server",
    "ray_workers",
]
"""Parts that import no heavy library, except for the pairs in `LAZY`."""

LAZY = {
    ("chat", "transformers"),
    ("data", "datasets"),
    ("environments", "mcp"),
    ("compat", "transformers"),
    ("terminal", "matplotlib"),
    ("ray_workers", "ray"),
    ("ray_workers", "torch"),  # in the functions that pack weights
}
"""Heavy libraries that a part may import inside a function."""

EXCEPT_EXCEPTION = {
    "engines/vllm/worker.py": 1,  # in vLLM's process, where an exception would end the server
    "errors.py": 1,
    "user_code/calls.py": 1,
    "user_code/threads.py": 1,
    "engines/local/engine.py": 1,
    "compat/swift/math_worker.py": 1,
    "compat/providers/harbor_worker.py": 1,
}
"""Where whatever is raised may be caught, BaseException included, besides the boundary, which is a context manager: the text of
an exception, the two ways to call a user's code, the requests of an embedded engine whose model raised, and the worker processes
of math-verify and of Harbor's package."""

RAISED_AGAIN = {
    "engines/remote/engine.py": 1,  # a cancelled weight update gives the old weights back as well
    "engines/remote/weights.py": 2,  # a cancelled broadcast ends its group, as a failed one does
    "user_code/references.py": 1,  # removes the half-imported module
    "compat/verl/names.py": 1,  # forgets the module, so that the next import fails in the same way
    "compat/verl/files.py": 2,  # closes the MCP servers that were started
    "compat/swift/plugins.py": 1,  # removes the half-imported plugin
    "runs/run_state.py": 1,  # writes a checkpoint of the last finished step
}
"""Handlers of any exception, BaseException included, that clean up and raise it again."""


def part_of(path: Path) -> str:
    """`data` of data/rows.py, `types` of types.py."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree, read once."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


@cache
def imports(path: Path, *, nested: bool = True) -> frozenset[str]:
    """The modules that a file imports, `turnwise.x.y` and `torch.nn` alike; `from turnwise import x` is `turnwise.x`."""
    inside: set[ast.AST] = set()
    for block in () if nested else nodes(path):
        checked = isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        if checked or isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside.update(ast.walk(block))
    found: set[str] = set()
    for node in nodes(path):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            if node.module == "turnwise":
                found |= {f"turnwise.{name.name}" for name in node.names}
            else:
                found.add(node.module)
    return frozenset(found)


def ours(path: Path) -> set[str]:
    """Our own modules that a file imports, without `turnwise.`."""
    return {name.removeprefix("turnwise.") for name in imports(path) if name.startswith("turnwise.")}


def heavy(path: Path, *, nested: bool = True) -> set[str]:
    """The heavy libraries that a file imports."""
    return {name.partition(".")[0] for name in imports(path, nested=nested)} & HEAVY


def test_there_is_something_to_read() -> None:
    assert {part_of(path) for path in FILES} >= {*MAY_IMPORT, "train", "sft", "doctor", "commands", "cli", "__init__"}
    assert "engines.engine" in ours(SOURCE / "rollout" / "rollout.py")  # the reading works
    assert "models.loading" in ours(SOURCE / "assembly" / "engines.py")  # nested imports too
    assert heavy(SOURCE / "chat" / "renderer.py") == {"transformers"}
    assert heavy(SOURCE / "chat" / "renderer.py", nested=False) == set()


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_knows_only_whom_it_may(part: str) -> None:
    files = [path for path in FILES if part_of(path) == part]
    assert files
    wrong = {
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in files
        for name in ours(path)
        if not any(name == known or name.startswith(f"{known}.") for known in {*MAY_IMPORT[part], part})
    }
    assert wrong == set()


def test_nobody_below_knows_the_trainer_or_the_command_line() -> None:
    above = {"train", "sft", "runs", "planning", "assembly", "doctor", "commands", "cli", "api"}
    joins = {*above, "__main__", "__init__"}  # the package's __init__ names the functions of api for type checkers
    wrong = {
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in FILES
        if part_of(path) not in joins
        for name in ours(path)
        if name.partition(".")[0] in above
    }
    assert wrong == set()
    assert {part_of(path) for path in FILES if "train" in ours(path)} <= {"cli", "commands", "api"}
    assert {part_of(path) for path in FILES if "cli" in ours(path)} == {"__main__"}


def test_there_is_no_circle_between_parts() -> None:
    knows = {part: set[str]() for part in {part_of(path) for path in FILES}}
    for path in FILES:
        knows[part_of(path)] |= {name.partition(".")[0] for name in ours(path)} - {part_of(path)}
    order: list[str] = []
    while len(order) < len(knows):
        ready = sorted(part for part in knows if part not in order and knows[part] <= set(order))
        assert ready, f"a circle among {sorted(set(knows) - set(order))}"
        order += ready
    assert order.index("types") < order.index("rollout") < order.index("train") < order.index("cli")


def test_the_page_names_files_that_exist_and_its_rows_are_the_order_of_the_imports() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```layers\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = [row.split() for row in block.splitlines()]
    row_of = {part: number for number, row in enumerate(rows) for part in row}
    assert sorted(part for row in rows for part in row) == sorted(
        {part_of(path) for path in FILES} - {"__init__", "__main__"}
    )
    wrong = {
        f"{part_of(path)} imports {name.partition('.')[0]}"
        for path in FILES
        if part_of(path) in row_of
        for name in ours(path)
        if name.partition(".")[0] != part_of(path) and row_of[name.partition(".")[0]] <= row_of[part_of(path)]
    }
    assert wrong == set()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert {name for name in named if not any(f"/{path.as_posix()}".endswith(f"/{name}") for path in FILES)} <= {
        "tests/test_architecture.py",
        "scripts/measure.py",
    }


def test_there_is_no_circle_between_files() -> None:
    names = {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    waiting = {name: {known for known in ours(path) if known in names} - {name} for name, path in names.items()}
    # a folder's __init__ re-exports what is in it, and nobody inside imports the folder
    while waiting:
        ready = {name for name, known in waiting.items() if not known & waiting.keys()}
        assert ready, f"a circle among {sorted(waiting)}"
        waiting = {name: known for name, known in waiting.items() if name not in ready}


@pytest.mark.parametrize("part", [*LIGHT, "data", "commands", "cli", "assembly"])
def test_a_part_loads_no_heavy_library_when_it_is_imported(part: str) -> None:
    for path in FILES:
        if part_of(path) == part:
            assert heavy(path, nested=False) == set(), path
            if part not in ("commands", "cli", "assembly"):
                assert heavy(path) <= {library for known, library in LAZY if known == part}, path


def test_torch_begins_in_the_trainer_and_in_the_embedded_engine() -> None:
    with_torch = {str(path.relative_to(SOURCE).parent) for path in FILES if "torch" in heavy(path)}
    alone = {path.name for path in FILES if path.parent == SOURCE and "torch" in heavy(path)}
    servers = {
        "engines/vllm",
        "engines/sglang",
        "engines/remote",
        "ray_workers",
    }  # tensors of images and weights on their way to servers
    assert with_torch <= {".", "models", "training", "training/sharded", "engines/local", "doctor", "sft", *servers}
    assert alone <= {"train.py"}
    for name in ("engine", "scripted"):
        assert heavy(SOURCE / "engines" / f"{name}.py") == set()


def test_torch_distributed_begins_in_the_training_of_several_ranks() -> None:
    distributed = {
        str(path.relative_to(SOURCE).parent)
        for path in FILES
        if any(name.startswith("torch.distributed") for name in imports(path))
    }
    assert distributed == {"training/sharded", "engines/remote"}  # engines/remote: weights to servers by broadcasts
    with_ranks = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if path.parent.name != "sharded"
        and any(
            name.startswith("turnwise.training.sharded") and not name.endswith(".options")
            for name in imports(path, nested=False)
        )
    }
    assert with_ranks == set()  # a run of one process imports nothing of it


def test_ray_is_imported_in_one_module_and_only_when_a_run_uses_it() -> None:
    with_ray = {path.relative_to(SOURCE).as_posix() for path in FILES if "ray" in heavy(path)}
    assert with_ray == {"ray_workers/ray_api.py"}
    assert heavy(SOURCE / "ray_workers" / "ray_api.py", nested=False) == set()


def test_every_exception_is_caught_in_the_boundary_and_in_the_listed_places_only() -> None:
    catching: dict[str, int] = {}
    raising: dict[str, int] = {}
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            assert node.type is not None, f"{path}:{node.lineno}: a bare except"
            caught = {leaf.id for leaf in ast.walk(node.type) if isinstance(leaf, ast.Name)}
            if not caught & {"Exception", "BaseException"}:
                continue
            last = node.body[-1]
            counts = raising if isinstance(last, ast.Raise) and last.exc is None else catching
            name = path.relative_to(SOURCE).as_posix()
            counts[name] = counts.get(name, 0) + 1
    assert catching == EXCEPT_EXCEPTION
    assert raising == RAISED_AGAIN


def _writes_reward(node: ast.AST) -> bool:
    """Whether it assigns an attribute `reward`, or copies an object with another one: `replace(turn, reward=...)`."""
    match node:
        case ast.Assign(targets=targets):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            targets = [target]
        case ast.Call(
            func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value="reward"), _]
        ):
            return True
        case ast.Call(func=ast.Name(id="replace"), args=[copied, *_], keywords=keywords):
            # a Reply is replaced with its reward changed; a Turn must not be
            return "turn" in ast.unparse(copied).lower() and any(keyword.arg == "reward" for keyword in keywords)
        case _:
            return False
    leaves = [leaf for target in targets for leaf in ast.walk(target)]
    return any(isinstance(leaf, ast.Attribute) and leaf.attr == "reward" for leaf in leaves)


@pytest.mark.slow
def test_the_reward_of_a_turn_is_written_in_one_place() -> None:
    writers = {
        (path.relative_to(SOURCE).as_posix(), function.name)
        for path in FILES
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if _writes_reward(node)
    }
    of_trajectories = {
        ("types.py", "fail"),
        ("rewards/scorer.py", "write"),
        ("rewards/scorer.py", "_write_agent"),
        ("doctor/options.py", "_advantages"),
    }
    assert writers - of_trajectories == {("types.py", "add_reward")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parsed(path))


def test_there_are_no_catch_all_keyword_arguments_in_our_signatures() -> None:
    allowed = {
        ("assembly/references.py", "_call"),  # hands a user's arguments on
        ("environments/environment.py", "factory"),  # hands a user's arguments on
        ("engines/sglang/processors/qwen.py", "process_mm_data_async"),  # the signature that SGLang calls
    }
    found = {
        (path.relative_to(SOURCE).as_posix(), node.name)
        for path in FILES
        if "torch" not in heavy(path)  # hooks of transformers have the signatures that it calls
        and part_of(path) != "compat"  # other systems' contracts have them
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.args.kwarg is not None
        and not _names_its_keys(node.args.kwarg)
    }
    assert found <= allowed


def _names_its_keys(argument: ast.arg) -> bool:
    """`**options: Unpack[Options]` accepts the keys of a TypedDict only."""
    return argument.annotation is not None and ast.unparse(argument.annotation).startswith("Unpack[")


def test_only_the_learner_and_the_embedded_engine_touch_the_trained_model() -> None:
    """`LocalLearner.model` is read where the embedded engine is built on the learner's parameters, and nowhere else."""
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "model"
        and _name(node.value) in ("learner", "run", "policy")
    }
    assert readers == {"assembly/learners.py"}  # the model that the engine samples from
    # the loops, the run's state and checkpoints know the protocol, which has no model
    protocol = next(
        node
        for node in ast.walk(parsed(SOURCE / "training" / "learner.py"))
        if isinstance(node, ast.ClassDef) and node.name == "Learner"
    )
    assert "model" not in {node.name for node in protocol.body if isinstance(node, ast.FunctionDef)}
    users = {path.relative_to(SOURCE).as_posix() for path in FILES if "training.local_learner" in ours(path)}
    assert users == {"assembly/learners.py"}
    loaders = {path.relative_to(SOURCE).as_posix() for path in FILES if "models.loading" in ours(path)}
    assert loaders <= {
        "training/local_learner.py",
        "training/sharded/sharded_model.py",
        "training/options.py",
        "assembly/learners.py",
        "assembly/policies.py",
        "assembly/engines.py",
        "models/staged_loading.py",
        "doctor/examine.py",
        "commands/models.py",
        "doctor/memory.py",
        # recomputation, published weights and fingerprints of models
        "training/sharded/sharded_learner.py",
        "training/local_critic.py",
        "training/reference.py",
        "training/sharded/shards.py",
        "training/sharded/consolidation.py",
        "training/sharded/parts.py",
        "engines/local/engine.py",
    }


def test_tests_with_several_processes_and_with_real_engines_stand_where_make_looks_for_them() -> None:
    """`make test-cluster` and `make test-engines` import these folders only."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert makefile.count("pytest tests/cluster -m ") == 3
    assert makefile.count("pytest tests/engines -m ") == 1
    marked = {"cluster": {"cluster"}, "ray": {"cluster"}, "engines": {"engines", "cluster"}}
    for marker, folders in marked.items():
        word = f"pytest.mark.{marker}\\b"
        files = [path for path in (ROOT / "tests").rglob("*.py") if re.search(word, path.read_text(encoding="utf-8"))]
        assert files
        assert {path.relative_to(ROOT / "tests").parts[0] for path in files} <= folders


def test_programs_beside_the_package_import_modules_that_exist() -> None:
    programs = [path for folder in ("demo", "scripts", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    programs = [path for path in programs if ".peers" not in path.parts]  # where the benchmarks install TRL
    imported = {(path.relative_to(ROOT).as_posix(), name) for path in programs for name in imports(path)}
    used = {(path, name) for path, name in imported if name.startswith("turnwise.")}
    assert ("demo/make_model.py", "turnwise.training.losses") in used  # the reading works
    known = {"turnwise." + ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in FILES}
    known |= {name.removesuffix(".__init__") for name in known} | {f"turnwise.{name}" for name in turnwise.__all__}
    assert {(path, name) for path, name in used if name not in known} == set()


def _name(node: ast.expr) -> str:
    """`learner` of the expressions `learner` and `run.learner`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
