"""Tasks in Harbor's format: two in the form of its documentation, and ten of our own, each with its reference solution.

A task is a mapping from the paths of its files to their contents; `DEFAULTS` are those of files that it does not name."""

from __future__ import annotations

from pathlib import Path

_GRADE = "if {}; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
DEFAULTS = {
    "task.toml": 'schema_version = "1.4"\n[metadata]\ncategory = "files"\n[verifier]\ntimeout_sec = 30.0\n[environment]\n',
    "environment/Dockerfile": "FROM ubuntu:24.04\n\nWORKDIR /app\n",
}


def graded(condition: str) -> str:
    """A test that gives 1 if a condition of the shell holds, else 0."""
    return "#!/bin/bash\n" + _GRADE.format(condition)


TASKS: dict[str, dict[str, str]] = {
    # in the form of Harbor's documentation
    "hello-world": {
        "task.toml": (
            'schema_version = "1.1"\n[task]\nname = "examples/hello-world"\ndescription = "Writes a file"\n'
            'authors = [{ name = "N. N." }]\nkeywords = ["trivial"]\n[metadata]\ndifficulty = "easy"\n'
            "[verifier]\ntimeout_sec = 120.0\n[agent]\ntimeout_sec = 120.0\n"
            "[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 2048\nstorage_mb = 10240\n"
        ),
        "instruction.md": "<!-- canary GUID 1 -->\n\nCreate a file hello.txt with the content Hello, world!\n",
        "tests/test.sh": graded('[ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, world!" ]'),
        "solution/solve.sh": "#!/bin/bash\necho 'Hello, world!' > hello.txt\n",
    },
    "hello-alpine": {
        "task.toml": (
            'version = "1.0"\n[metadata]\nauthor_name = "N. N."\ntags = ["trivial", "alpine"]\n[verifier]\ntimeout_sec = 120.0\n'
            '[agent]\ntimeout_sec = 120.0\n[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory = "2G"\nstorage = "10G"\n'
        ),
        "instruction.md": "Create /app/hello.txt with the content Hello, Alpine!\n",
        "environment/Dockerfile": "FROM alpine:3.22\nWORKDIR /app\n",
        "tests/test.sh": "#!/bin/sh\nexec python3 /tests/test_state.py\n",
        "tests/test_state.py": (
            "import json, pathlib\nfile = pathlib.Path('/app/hello.txt')\n"
            "right = file.exists() and file.read_text().strip() == 'Hello, Alpine!'\n"
            "pathlib.Path('/logs/verifier/reward.json').write_text(json.dumps({'reward': float(right)}))\n"
        ),
        "solution/solve.sh": "#!/bin/sh\nprintf 'Hello, Alpine!\\n' > /app/hello.txt\n",
    },
    # our own
    "mean": {
        "instruction.md": "stats.py has a wrong function. Correct it.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY stats.py .\n",
        "environment/stats.py": "def mean(values):\n    return sum(values) / (len(values) + 1)\n",
        "tests/test.sh": "#!/bin/bash\n"
        + _GRADE.format(
            """python3 -c 'import sys; sys.path.insert(0, "/app"); from stats import mean; assert mean([1, 3]) == 2'"""
        ),
        "solution/solve.sh": "#!/bin/bash\nsed -i 's/ (len(values) + 1)/ len(values)/' stats.py\n",
    },
    "column": {
        "instruction.md": "Write the sum of the second column of /app/data/numbers.csv to /app/answer.txt.\n",
        "environment/Dockerfile": 'FROM debian:bookworm-slim\nCOPY numbers.csv /app/data/\nWORKDIR /app\nCMD ["bash"]\n',
        "environment/numbers.csv": "a,3\nb,4\nc,35\n",
        "tests/test.sh": graded("grep -qx 42 /app/answer.txt"),
        "solution/solve.sh": "#!/bin/bash\nawk -F, '{ sum += $2 } END { print sum }' data/numbers.csv > answer.txt\n",
    },
    "parts": {
        "instruction.md": "Create the files a.txt and b.txt with their names in capitals as content.\n",
        "tests/test.sh": (
            "#!/bin/bash\ncd /app\na=$(grep -cx A a.txt); b=$(grep -cx B b.txt)\n"
            'echo "{\\"first\\": ${a:-0}, \\"second\\": ${b:-0}}" > /logs/verifier/reward.json\n'
        ),
        "solution/solve.sh": "#!/bin/bash\necho A > a.txt\necho B > b.txt\n",
    },
    "rename": {
        "instruction.md": "In /workspace, rename all files that end with .jpeg so that they end with .jpg.\n",
        "environment/Dockerfile": (
            "FROM ubuntu:22.04\nRUN mkdir -p /workspace/photos \\\n    # comment\n    && touch /workspace/one.jpeg \\\n"
            "    && touch /workspace/photos/two.jpeg\nWORKDIR /workspace\n"
        ),
        "tests/test.sh": graded("[ -f one.jpg ] && [ -f photos/two.jpg ] && ! ls one.jpeg photos/two.jpeg 2>/dev/null"),
        "solution/solve.sh": '#!/bin/bash\nfind . -name "*.jpeg" | while read -r one; do mv "$one" "${one%.jpeg}.jpg"; done\n',
    },
    "variables": {
        "instruction.md": "Write the value of the variable GREETING to /app/out.txt.\n",
        "task.toml": (
            '[environment]\nenv = { PLACE = "Oslo", OWNER = "${NOBODY_SETS_THIS:-us}" }\n'
            '[verifier]\ntimeout_sec = 30\nenv = { WANTED = "Hello from us" }\n'
        ),
        "environment/Dockerfile": (
            'FROM ubuntu:24.04\nARG WHO=us\nENV GREETING="Hello from ${WHO}" OTHER=x\nWORKDIR /app\nRUN echo "$WHO" > /app/who\n'
        ),
        "tests/test.sh": graded('grep -qx us who && [ "$PLACE$OWNER" = Oslous ] && [ "$(cat out.txt)" = "$WANTED" ]'),
        "solution/solve.sh": '#!/bin/bash\necho "$GREETING" > /app/out.txt\n',
    },
    "commit": {
        "instruction.md": "Commit the file notes.txt to the git repository in /app.\n",
        "environment/Dockerfile": (
            "FROM buildpack-deps:bookworm\nWORKDIR /app\n"
            "RUN git init -q . && git config user.name N && git config user.email n@n\n"
            "COPY --chown=root:root notes.txt ./\n"
        ),
        "environment/notes.txt": "Buy milk.\n",
        "tests/test.sh": graded('[ "$(git show HEAD:notes.txt)" = "Buy milk." ]'),
        "solution/solve.sh": "#!/bin/bash\ngit add notes.txt && git commit -qm notes\n",
    },
    "script": {
        "instruction.md": "Make /app/bin/greet run: it must print Hi when it is called.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nCOPY bin /app/bin\nWORKDIR /app\n",
        "environment/bin/greet": "#!/bin/sh\necho Ho\n",
        "tests/test.sh": graded('[ "$(/app/bin/greet)" = Hi ]'),
        "solution/solve.sh": "#!/bin/bash\nsed -i s/Ho/Hi/ bin/greet\nchmod +x bin/greet\n",
    },
    "logs": {
        "instruction.md": "Write the number of lines with ERROR in all files of /app/logs to /app/count.\n",
        "environment/Dockerfile": 'FROM ubuntu:24.04\nADD ["*.log", "/app/logs/"]\nWORKDIR /app\nCOPY --chmod=755 tool ./bin/\n',
        "environment/tool": "#!/bin/sh\ngrep -c ERROR\n",
        "environment/a.log": "INFO\nERROR x\n",
        "environment/b.log": "ERROR y\nERROR z\n",
        "tests/test.sh": graded("grep -qx 3 count"),
        "solution/solve.sh": "#!/bin/bash\ncat logs/*.log | bin/tool > count\n",
    },
    "nested/place": {
        "instruction.md": "Write the path of your working directory to the file here.\n",
        "task.toml": '[environment]\nworkdir = "/project/src"\n',
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /project\nCOPY . .\n",
        "environment/keep.txt": "kept\n",
        "tests/test.sh": graded('[ "$(cat /project/src/here)" = /project/src ] && grep -q kept /project/keep.txt'),
        "solution/solve.sh": "#!/bin/bash\npwd > here\n",
    },
    "half": {
        "instruction.md": "Write as many of the first two prime numbers as you know to /app/primes, one in a line.\n",
        "tests/test.sh": (
            "#!/bin/bash\ngood=$(printf '2\\n3\\n' | grep -cxFf /app/primes)\n"
            'python3 -c "print(${good:-0} / 2)" > /logs/verifier/reward.txt\n'
        ),
        "solution/solve.sh": "#!/bin/bash\nprintf '2\\n3\\n' > primes\n",
    },
}


def write_tasks(folder: Path, *names: str, **changed: str) -> Path:
    """Write tasks to a folder, all of them if none is named; `changed` are files of the tasks, by a name such as `task_toml`."""
    for name in names or TASKS:
        files = {**DEFAULTS, **TASKS[name]}
        for key, text in changed.items():
            files[CHANGED[key]] = text
        for place, text in files.items():
            path = folder / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folder


CHANGED = {"task_toml": "task.toml", "dockerfile": "environment/Dockerfile", "test": "tests/test.sh"}
"""The files that `write_tasks` can change, by the names of its arguments."""
