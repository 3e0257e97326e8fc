"""Private names of frameworks: what is told if one is not as the integration knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.errors import UsageError


def unknown(name: str, framework: str, tested: str) -> UsageError:
    """What to raise for a name that is not there, or is another thing than in the version that was tested."""
    return UsageError(
        f"{name} is not as unbroken knows it from {framework} {tested}: a newer unbroken may know this version, or "
        f"install {framework} {tested}"
    )


def check_attributes(found: Any, attributes: Sequence[str], framework: str, tested: str) -> None:
    """Raise UsageError, naming the first attribute that an object of a framework lacks."""
    for attribute in attributes:
        if not hasattr(found, attribute):
            raise unknown(f"{type(found).__name__}.{attribute}", framework, tested)
