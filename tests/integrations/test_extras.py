"""A framework that is missing or too old is named, with what installs it."""

import importlib
import sys

import pytest

from unbroken.errors import UsageError
from unbroken.integrations.extras import needs


def test_a_missing_extra_is_named():
    with pytest.raises(UsageError, match=r"no_such_thing 1\.0 or newer is needed: pip install 'unbroken\[thing\]'"):
        needs("no_such_thing", "thing", "1.0")
    with pytest.raises(UsageError, match=r"unbroken\[torch\].*this is"):
        needs("torch", "torch", "999.0")


@pytest.mark.parametrize(
    ("integration", "framework"),
    [
        ("transformers", "transformers"),
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("fabric", "lightning"),
        ("deepspeed", "deepspeed"),
        ("ray", "ray"),
    ],
)
def test_without_its_framework_an_integration_names_the_extra(monkeypatch, integration, framework):
    for name in [name for name in sys.modules if name.startswith(f"unbroken.integrations.{integration}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(UsageError, match=rf"{framework} .* is needed: pip install 'unbroken\[{framework}\]'"):
        importlib.import_module(f"unbroken.integrations.{integration}")
