"""A framework that is missing or too old is named, with what installs it."""

import pytest

from unbroken.errors import UsageError
from unbroken.integrations.extras import needs


def test_a_missing_extra_is_named():
    with pytest.raises(UsageError, match=r"no_such_thing 1\.0 or newer is needed: pip install 'unbroken\[thing\]'"):
        needs("no_such_thing", "thing", "1.0")
    with pytest.raises(UsageError, match=r"unbroken\[torch\].*this is"):
        needs("torch", "torch", "999.0")
