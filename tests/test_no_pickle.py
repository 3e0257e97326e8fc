"""No pickle, ever, in what is read or written (invariant 10)."""

import ast
import json
from pathlib import Path

import pytest
from safetensors import safe_open

import unbroken
from toy import make_job, train

SOURCE = Path(unbroken.__file__).parent
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}
TORCH_FILES = SOURCE / "exchange/torch_files.py"
"""Where `unbroken export` writes files of torch.save, and `unbroken import` reads them: weights only."""


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_can_read_or_write_pickles(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in FORBIDDEN
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and path != TORCH_FILES:
            assert (node.value.id, node.attr) not in FORBIDDEN_CALLS


def test_files_of_torch_are_read_weights_only():
    calls = [
        node
        for node in ast.walk(ast.parse(TORCH_FILES.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for call in calls:
        assert [ast.unparse(word.value) for word in call.keywords if word.arg == "weights_only"] == ["True"]


def test_a_run_directory_holds_safetensors_and_json_only(tmp_path):
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=2))
    job.ckpt.restore()
    train(job, 4).ckpt.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for path in files:
        if path.suffix == ".json":
            assert json.loads(path.read_bytes())["format"] == "unbroken"
        else:
            with safe_open(path, "pt") as tensors:
                assert "model/0.weight" in tensors.keys()  # noqa: SIM118  # it is no dict
