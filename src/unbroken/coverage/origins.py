"""Whose code a class or a module is: the user's own, or installed.

Libraries are full of objects with `state_dict`; what a script's author wrote with one is meant to be saved.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from unbroken.coverage.peek import is_a

_OWN = "unbroken"
_STDLIB = tuple(Path(sysconfig.get_path(which)).resolve() for which in ("stdlib", "platstdlib"))


def namespace(module: object) -> dict[str, Any]:
    """A module's globals. Does not make a lazy module load; {} for an object that only stands in for a module."""
    if not is_a(module, ModuleType):
        return {}
    names = object.__getattribute__(module, "__dict__")
    return names if type(names) is dict else {}


def is_users_class(cls: type) -> bool:
    """Whether the class is defined in the user's own code."""
    name = cls.__dict__.get("__module__")
    return type(name) is str and is_users_module(name, namespace(sys.modules.get(name)))


def is_users_module(name: str, names: dict[str, Any]) -> bool:
    """Whether a module is the user's own code: the script, a notebook, or a file that was not installed.

    names  its globals
    """
    if name == "__main__":
        return True
    file = names.get("__file__")
    return type(file) is str and name.partition(".")[0] != _OWN and not _is_installed(name, file)


@functools.cache
def _is_installed(name: str, file: str) -> bool:
    path = Path(file).resolve()
    above = list(path.parents)
    if "site-packages" in path.parts or "dist-packages" in path.parts or any(root in above for root in _STDLIB):
        return True
    depth = name.count(".") + (path.stem == "__init__")
    return depth < len(above) and _holds_packages(above[depth])


@functools.cache
def _holds_packages(directory: Path) -> bool:
    """Whether pip installed into this directory (`pip install --target`)."""
    try:
        return any(entry.suffix == ".dist-info" for entry in directory.iterdir())
    except OSError:
        return False
