"""Frameworks are extras: what is told if one is missing, or too old."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import ModuleType

from unbroken.errors import UsageError


def needs(module: str, extra: str, at_least: str) -> ModuleType:
    """Import a framework.

    extra     the name that installs it: `pip install 'unbroken[extra]'`
    at_least  the oldest version that will do

    Raises UsageError, which names the extra, if the framework is not there or older.
    """
    told = f"{module} {at_least} or newer is needed: pip install 'unbroken[{extra}]'"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{told} ({error})") from error
    version = importlib.metadata.version(module)
    if _numbers(version) < _numbers(at_least):
        raise UsageError(f"{told} (this is {version})")
    return found


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
