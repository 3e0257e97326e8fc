"""Imports run downwards only (DESIGN section 3)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken

SOURCE = Path(unbroken.__file__).parent

LAYERS = [
    {"errors"},
    {"cluster", "cuda", "elements", "faultpoints", "garbage", "layout", "pacing", "probes", "restored"},
    {"image", "store", "state", "data"},
    {"manifest", "policy", "overlap"},
    {"generations", "blocks", "planning", "environment", "preemption", "meeting", "values", "coverage"},
    {"kept", "votes"},
    {"snapshot"},
    {"replicas"},
    {"retention", "agreement"},
    {"candidates", "commit", "pieces", "ledger", "directory"},
    {"reading"},
    {"recovery", "writer", "saves", "verification", "comparison"},
    {"planner"},
    {"session", "pruning", "exchange"},
    {"checkpointer"},
    {"integrations", "prove"},
    {"cli"},
    {"__main__"},
]
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}
KNOW_NOTHING_OF = {
    "layout": {"cluster", "state", "store", "image", "data"},
    "image": {"cluster", "state", "store", "data", "layout"},
    "store": {"cluster", "state", "image", "data", "layout", "torch"},
    "state": {"cluster", "store", "image", "data"},
    "coverage": {"cluster", "store", "image", "data", "layout"},
    "data": {"cluster", "store", "image", "state", "layout"},
}


def modules():
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names a module imports, wherever in it the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_rooms_below_its_own(path):
    room = room_of(path)
    assert room in DEPTH, f"{room} has no place in the layers"
    for name in imported(path):
        parts = name.split(".")
        assert not (room in KNOW_NOTHING_OF and parts[0] in KNOW_NOTHING_OF[room]), f"{room} imports {name}"
        if parts[0] != "unbroken" or parts[1] == room:
            continue
        other = parts[1]
        if other not in DEPTH:
            assert room == "cli", f"{path} imports {name} from the top: import it from where it is defined"
            continue
        assert DEPTH[other] < DEPTH[room], f"{room} imports {name}, which does not lie below it"
        assert other not in KNOW_NOTHING_OF.get(room, set()), f"{room} must know nothing of {other}"


def test_importing_unbroken_imports_no_framework_and_configures_no_logging():
    code = (
        "import sys, logging, unbroken;"
        "frameworks = {'torchdata', 'datasets', 'lightning', 'accelerate', 'transformers', 'deepspeed', 'ray'};"
        "assert not frameworks & set(sys.modules), frameworks & set(sys.modules);"
        "assert not logging.getLogger().handlers and not logging.getLogger('unbroken').handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
