"""Log messages of libraries that say nothing about a run, and are not shown."""

import logging

__all__ = ["silence_libraries"]


def _not_of_kernels(record: logging.LogRecord) -> bool:
    return "4bit" not in str(record.msg)


def _not_of_error_reports(record: logging.LogRecord) -> bool:
    return "sentry" not in record.getMessage()


_FILTERS = {
    # peft imports bitsandbytes, whose 4-bit kernels of the CPU are missing without the package `kernels`
    "bitsandbytes.backends.cpu.ops": _not_of_kernels,
    # trl imports weave, which reports its errors to sentry, and tries again without a network
    "urllib3.connectionpool": _not_of_error_reports,
}
"""By the name of the logger: which of its messages are shown."""


def silence_libraries() -> None:
    """Filter these messages. To be called before a library, or code of a user that may import it, is imported."""
    for name, shown in _FILTERS.items():
        logging.getLogger(name).addFilter(shown)  # the same function is added once
