"""`turnwise push`: a checkpoint of a run as a model repository on the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from turnwise.commands.command import Context, print_lines
from turnwise.errors import ConfigError, RunError, text_of
from turnwise.local_paths import refuse_weights_in_parts

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def register_push(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Upload a checkpoint of a run to the Hugging Face hub, with a model card (curve, metrics, options), the recipe and the "
        "curve. The login is that of huggingface_hub: `hf auth login`, or the environment variable HF_TOKEN."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run of train or sft")
    parser.add_argument(
        "--to", required=True, metavar="USER/NAME", help="the repository; it is made if it does not exist"
    )
    parser.add_argument(
        "--best", action="store_true", help="the best checkpoint (checkpoint.best) in place of the newest one"
    )
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    parser.add_argument("--dry-run", action="store_true", help="print the card and the files, and upload nothing")
    parser.set_defaults(command=_run_push, long=True)


def _run_push(options: argparse.Namespace, context: Context) -> int:
    from turnwise.terminal.run_card import model_card

    if _NAME.fullmatch(options.to) is None:
        raise ConfigError(f"--to {options.to} is not a repository: write USER/NAME")
    run: Path = options.run
    link = "best" if options.best else "checkpoint"
    files = files_of(run, link)
    card = model_card(run, name=options.to, curve="curve.png" in files, link=link)
    if options.dry_run:
        print_lines(context.console, [card, f"files for {options.to}:", "  README.md"])
        print_lines(context.console, [f"  {name}  ({path})" for name, path in files.items()])
        return 0
    address = upload(options.to, card, files, private=options.private)
    print_lines(context.console, [f"{len(files) + 1} files are in {address}"])
    return 0


def files_of(run: Path, link: str) -> dict[str, Path]:
    """The files to upload by their name in the repository: the model's, the recipe and the curve. `link` names the model:
    `checkpoint` or `best`.

    Raises RunError if the run has no such checkpoint.
    """
    model = run / link
    if not model.is_dir() and link == "best":
        raise RunError(
            f"{run.absolute()} has no best checkpoint: a run with checkpoint.best=METRIC keeps one, once an evaluation is better "
            f"than the one before the first step"
        )
    if not model.is_dir():
        raise RunError(f"{run.absolute()} has no checkpoint: `turnwise train` and `sft` write them")
    refuse_weights_in_parts(model, error=RunError)
    # peft writes a README.md of its own
    files = {str(p.relative_to(model)): p for p in sorted(model.rglob("*")) if p.is_file() and p.name != "README.md"}
    others = {"recipe.yaml": run / "config.yaml", "curve.png": run / "curve.png"}
    return files | {name: path for name, path in others.items() if path.is_file()}


def upload(name: str, card: str, files: dict[str, Path], *, private: bool) -> str:
    """Make the repository, and upload everything in one commit; of the recipe, what others may see. Returns its address. Raises
    RunError if the hub refuses it."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    added = [
        CommitOperationAdd(file, _published_recipe(path).encode() if file == "recipe.yaml" else str(path))
        for file, path in files.items()
    ]
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(
            name,
            [CommitOperationAdd("README.md", card.encode()), *added],
            commit_message="Upload a model trained with turnwise",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise RunError(
            f"{name} could not be uploaded: {text_of(error)}. Log in with `hf auth login`, or set HF_TOKEN; --dry-run shows what "
            f"would be uploaded"
        ) from None
    return str(address)


def _published_recipe(path: Path) -> str:
    """The recipe for others: of files and directories of this machine only the names."""
    import yaml

    from turnwise.terminal.run_card import published

    text = path.read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    shown = published(recipe)
    return text if shown == recipe else yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
