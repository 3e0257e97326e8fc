"""Frameworks are extras: one that is missing or too old is told of by the name of its extra."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

from unbroken.errors import UsageError


def needs(module: str, extra: str, at_least: str) -> ModuleType:
    """The imported module.

    Raises UsageError, which names the extra and the oldest version, if it is missing or older than `at_least`.
    """
    problem = f"{module} {at_least} or newer is needed: pip install 'unbroken[{extra}]'"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{problem} ({error})") from error
    version = str(getattr(found, "__version__", "0"))
    if _numbers(version) < _numbers(at_least):
        raise UsageError(f"{problem} ({version} is installed)")
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers: (2, 6, 6) of "2.6.6.post1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
