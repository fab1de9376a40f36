r"""Helper functions that users of verl import, with verl's names: graders, files, images, search.

- `verl.utils.reward_score.gsm8k` compares texts, not numbers: `#### 72.0` is not equal to `72`. It exists to give the same
  rewards as verl; `turnwise.data.numeric_answers` compares numbers.
- `verl.utils.reward_score.math_reward` reads `\boxed{...}`, as verl's preprocessing scripts for mathematics do.
- `verl.utils.hdfs_io` and `verl.utils.fs`: local paths and hdfs://, which needs the command line tool `hdfs`. Training does not
  use them.
- `verl.utils.dataset.vision_utils` converts the Python type of images and videos; the model's processor resizes and splits them.
- `verl.tools.utils.search_r1_like_utils` returns documents as JSON text, and the request's metadata."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.data.images import load_image
from turnwise.environments.search import Search
from turnwise.errors import TurnwiseError

GRADED = ("openai/gsm8k",)
"""Values of `data_source` that have a grader."""

_LOOKED_AT = 300  # number of characters at the end of a text
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The answer in a text: after the last `#### ` (strict), or its last number (flexible); None if there is none."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"the method is {method!r}; there are 'strict' and 'flexible'")
    end = solution_str[-_LOOKED_AT:]
    if method == "strict":
        marked = _MARKED.findall(end)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = [number for number in _NUMBER.findall(end) if number != "."]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong answer, 0 if there is no answer."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float:
    """The score of the grader of a `data_source`. Raises NotImplementedError if it has no grader."""
    if data_source not in GRADED:
        raise NotImplementedError(
            f"turnwise has no grader of verl's for the data_source {data_source!r} (it has: {', '.join(GRADED)})"
        )
    return compute_score(solution_str, ground_truth)


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` or `\fbox{...}` with its braces balanced, or `\boxed x` up to a dollar sign; else None."""
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    start = max(string.rfind("\\boxed"), -1)
    start = start if start >= 0 else string.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(string)):
        depth += {"{": 1, "}": -1}.get(string[place], 0)
        if string[place] == "}" and depth == 0:
            return string[start : place + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""The text inside `\boxed{...}`, or after `\boxed `. Raises ValueError for any other text."""
    if s.startswith("\\boxed "):
        return s.removeprefix("\\boxed ")
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise ValueError(f"{s!r:.80} is not of the form \\boxed{{...}}")
    return s.removeprefix("\\boxed{")[:-1]


_REMOTE = "hdfs://"


def exists(path: str, **kwargs: Any) -> bool:
    """Whether there is a file or directory at `path`."""
    return _hdfs("-test", "-e", path, check=False) == 0 if path.startswith(_REMOTE) else os.path.exists(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a directory and its parents. Raises FileExistsError if a local directory exists and `exist_ok` is false."""
    if name.startswith(_REMOTE):
        _hdfs("-mkdir", "-p", name)
    else:
        os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> Any:
    """Copy a file or a directory. Returns the path of the copy, or True if the source or the target is on HDFS."""
    if src.startswith(_REMOTE) or dst.startswith(_REMOTE):
        action = (
            ["-get"] if not dst.startswith(_REMOTE) else ["-cp", "-f"] if src.startswith(_REMOTE) else ["-put", "-f"]
        )
        _hdfs(*action, src, dst)
        return True
    return shutil.copytree(src, dst, **kwargs) if os.path.isdir(src) else shutil.copy(src, dst, **kwargs)


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: Any) -> str:
    """The path of a local copy. A local path is returned unchanged; an hdfs:// path is copied once into `cache_dir`."""
    if not src.startswith(_REMOTE):
        return src
    folder = Path(cache_dir or "~/.cache/verl").expanduser()
    local = folder / src.removeprefix(_REMOTE).strip("/").replace("/", "_")
    if not local.exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy(src, str(local))
    return str(local)


def _hdfs(*arguments: str, check: bool = True) -> int:
    program = shutil.which("hdfs")
    if program is None:
        raise FileNotFoundError(
            f"{arguments[-1]}: the command line tool `hdfs` is not on the path; install it, or use local paths"
        )
    done = subprocess.run([program, "dfs", *arguments], check=False)
    if check and done.returncode != 0:
        raise OSError(f"hdfs dfs {' '.join(arguments)} ended with status {done.returncode}")
    return done.returncode


def process_image(image: Any, image_patch_size: int | None = None) -> Any:
    """A PIL image in RGB, from a PIL image, a path, bytes, or a mapping `{"image": ...}` or `{"bytes": ...}`.

    `image_patch_size` is accepted for verl's callers and not used: the model's processor sets it.
    """
    if isinstance(image, Mapping) and image.get("image") is not None:
        image = image["image"]
    return load_image(image, where="process_image")


def process_video(video: Any, *, image_patch_size: int | None = None) -> list[Any]:
    """A list of frames as PIL images, from a list of images, or a mapping `{"video": [...]}`.

    Raises ValueError for a file: video files are not decoded here.
    """
    if isinstance(video, Mapping):
        video = video.get("video")
    if not isinstance(video, list | tuple):
        raise ValueError(f"a video must be a list of its frames; got {video!r:.80}: decode the file into frames first")
    return [process_image(frame) for frame in video]


def perform_single_search_batch(
    retrieval_service_url: str,
    query_list: Sequence[str],
    topk: int = 3,
    concurrent_semaphore: Any = None,
    timeout: float = 30,
) -> tuple[str, dict[str, Any]]:
    """Send queries to a retrieval service and wait. Returns `{"result": text}` as JSON, and the request's metadata.

    If the service does not answer, both contain the error, and nothing is raised. `concurrent_semaphore` is held during the
    request.
    """
    search = Search(retrieval_service_url, topk=topk, timeout=float(timeout))
    problem, text = None, ""
    with concurrent_semaphore or contextlib.nullcontext():
        try:
            text = asyncio.run(search.search(list(query_list)))
        except (TurnwiseError, ValueError) as error:
            problem = str(error)
    num_results = text.count("(Title: ")
    metadata = {
        "query_count": len(query_list),
        "queries": list(query_list),
        "api_request_error": problem,
        "status": "api_error" if problem else "success" if num_results else "no_results",
        "total_results": num_results,
        "formatted_result": None if problem else text,
    }
    return json.dumps({"result": f"Search error: {problem}" if problem else text}, ensure_ascii=False), metadata
