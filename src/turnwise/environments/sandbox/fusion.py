"""Sends programs written by a model to a SandboxFusion server (github.com/bytedance/SandboxFusion, `POST /run_code`).

Unlike verl's client, this client reports to the model why a program failed: standard error, a time limit, a compile error.
A failure of the server is an error of the tool, and is never reported as an error of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.environments.sandbox.process import Ran, SandboxError
from turnwise.errors import ConfigError
from turnwise.services.json_service import service


class SandboxFusion:
    """A tool that runs a program on a SandboxFusion server.

    `url` is the address of the server, with or without `/run_code`. The server applies `run_timeout` and `compile_timeout`
    (seconds). `timeout` is the limit of one HTTP request in seconds. A request is repeated up to `retries` times if the server
    is unreachable, overloaded or broken; the pause before each retry grows by `pause` seconds. The model receives at most
    `output_chars` characters of standard output, and as many of standard error.

    Raises ConfigError if an option is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        language: str = "python",
        run_timeout: float = 10.0,
        compile_timeout: float = 10.0,
        memory_limit_mb: int = 1024,
        timeout: float | None = None,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 10,
        output_chars: int = 16_000,
    ) -> None:
        for name, value in {
            "run_timeout": run_timeout,
            "compile_timeout": compile_timeout,
            "memory_limit_mb": memory_limit_mb,
            "output_chars": output_chars,
        }.items():
            if not value > 0:
                raise ConfigError(f"SandboxFusion: {name} is {value}; it must be above 0")
        address = url.rstrip("/")
        self._service = service(
            address if address.endswith("/run_code") else f"{address}/run_code",
            timeout=timeout if timeout is not None else run_timeout + compile_timeout + 10,
            retries=retries,
            pause=pause,
            max_concurrent=max_concurrent,
        )
        self._request = {
            "language": language,
            "run_timeout": run_timeout,
            "compile_timeout": compile_timeout,
            "memory_limit_MB": memory_limit_mb,
        }
        self._output_chars = output_chars

    async def code_interpreter(self, code: str) -> str:
        """Run a program and get what it printed. Print what you want to see. Nothing is kept between two calls.

        Args:
            code: The program.
        """
        answer = await self._service.ask({**self._request, "code": code})
        return self._read(answer).text_for_model()

    def _read(self, answer: Mapping[str, Any]) -> Ran:
        """Convert the server's answer to the result of a program.

        Raises SandboxError if the server reports a failure of its own, or if the answer does not follow the protocol.
        """
        if answer.get("status") not in ("Success", "Failed"):
            message = answer.get("message") or answer.get("status") or answer
            raise SandboxError(f"the server {self._service.url} could not run the program: {str(message)[:300]}")
        built = answer.get("compile_result")
        if isinstance(built, Mapping) and (built.get("status") != "Finished" or built.get("return_code")):
            return self._ran(built, "the compilation took longer than", self._request["compile_timeout"])
        run = answer.get("run_result")
        if not isinstance(run, Mapping):
            raise SandboxError(f"the server {self._service.url} returned no run_result: {str(answer)[:300]}")
        return self._ran(run, "the program ran longer than", self._request["run_timeout"])

    def _ran(self, result: Mapping[str, Any], too_long: str, seconds: Any) -> Ran:
        streams = [self._cut(str(result.get(name) or "")) for name in ("stdout", "stderr")]
        output = "\n".join(text.rstrip("\n") for text in streams if text.strip())
        status, code = result.get("status"), result.get("return_code")
        stopped = None
        if status == "TimeLimitExceeded":
            stopped = f"{too_long} {seconds:g} s"
        elif status != "Finished":
            stopped = f"the server reported {status}"
        took = result.get("execution_time")
        return Ran(
            output=output,
            status=code if isinstance(code, int) else 0,
            stopped=stopped,
            seconds=took if isinstance(took, int | float) else 0.0,
        )

    def _cut(self, text: str) -> str:
        if len(text) <= self._output_chars:
            return text
        half = self._output_chars // 2
        missing = len(text) - 2 * half
        return f"{text[:half]}\n[... {missing} characters of output left out ...]\n{text[len(text) - half :]}"
