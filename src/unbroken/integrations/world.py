"""The batch size of this start, where another number of ranks trained before.

Frameworks work out how many steps an epoch has, and with it the schedule of learning rates, before there is anything
that could be restored. So the newest checkpoint is asked beforehand; the restore then checks what comes of it.
"""

from __future__ import annotations

from pathlib import Path

from unbroken.candidates import candidates, find_tip
from unbroken.directory import run_directory
from unbroken.state.codec import decode
from unbroken.state.objects import Stateful
from unbroken.store.local import LocalStore


def size_as_saved(loader: Stateful, path: str | Path, world_size: int, name: str = "loader") -> None:
    """Give the loader the batch size with which the global batch stays what it was.

    name  that it is registered by
    """
    root = run_directory(path)
    if not root.is_dir():
        return
    store = LocalStore(root)
    tip, _ = find_tip(store)
    newest = next((each.manifest for each in candidates(store, tip) if each.manifest is not None), None)
    if newest is None or newest.world_size == world_size:
        return
    for record in newest.values.get(name, []):
        state = record.value.get("state")
        if state:
            loader.load_state_dict(decode(state, {}))
            return
