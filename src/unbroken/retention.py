"""What is deleted, and when: only after a newer checkpoint has committed, and never the last good one.

Checkpoints are ordered by the step and generation that their manifests record; names and times do not count
(invariant 5). Only checkpoints on the lineage of the running generation are counted and deleted: an abandoned history
is no business of this run's retention. One rank deletes: the coordinator.

The order of a deletion, and what a crash leaves after each point (invariant 14): the manifest first, durably (the
checkpoint no longer exists; its files are leftovers), then the files, then the directory. Leftovers are found by the
next sweep.
"""

from __future__ import annotations

import logging
import re

from unbroken import faultpoints
from unbroken.errors import UnbrokenError
from unbroken.generations import DIRECTORY, Generation
from unbroken.manifest import MOST_BYTES, Manifest, decode, parse_step_directory
from unbroken.policy import Keep
from unbroken.store.local import LocalStore

log = logging.getLogger(__name__)

MANIFEST_NAME = re.compile(r"manifest(?:\.g\d{4,})?\.json")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]+|\.probe-(\d{4,})-[0-9a-f]+")
_OUR_FILE = re.compile(r"g(\d{4,})-rank-\d{5,}(?:-\d+)?\.safetensors|\.tmp-[0-9a-f]+")


def sweep(store: LocalStore, generation: Generation, keep: Keep) -> None:
    """Delete what `keep` does not keep, and what crashed saves of earlier generations left behind.

    Call only after a commit of `generation`. Errors of single deletions are logged: the next sweep tries again.
    """
    ours: list[tuple[tuple[int, int], str]] = []
    steps = [(place, name) for name in store.list("") if (place := parse_step_directory(name)) is not None]
    for _, directory in steps:
        manifests = _manifests(store, directory)
        if manifests is None:
            continue  # a manifest we cannot read has a step we cannot know: never deleted
        on_lineage = [manifest for manifest in manifests if generation.reaches(manifest.where)]
        if on_lineage:
            ours.append(((on_lineage[0].step, on_lineage[0].micro_step), directory))
        _delete_leftovers(store, directory, manifests, generation.number)
    ours.sort(reverse=True)
    for _, directory in ours[keep.last :]:
        _delete_checkpoint(store, directory)
    _delete_leftovers_of_starts(store, generation.number)
    for place, directory in steps:
        # An empty directory after the newest checkpoint may be the one a rank has just made for the next save.
        if ours and place < ours[0][0]:
            store.delete_directory(directory)


def _manifests(store: LocalStore, directory: str) -> list[Manifest] | None:
    """The manifests in a step directory; None if one of them cannot be read."""
    manifests = []
    for name in store.list(directory):
        if MANIFEST_NAME.fullmatch(name):
            try:
                manifests.append(decode(store.read(f"{directory}/{name}", MOST_BYTES), f"{directory}/{name}"))
            except (UnbrokenError, OSError, ValueError, EOFError) as error:
                log.debug("retention leaves %s alone: %s", directory, error)
                return None
    return manifests


def _delete_leftovers(store: LocalStore, directory: str, manifests: list[Manifest], current: int) -> None:
    """Files of dead generations that no manifest refers to. The current generation's may be a save in progress."""
    used = {file.name for manifest in manifests for file in manifest.files}
    for name in store.list(directory):
        match = _OUR_FILE.fullmatch(name)
        if match is None or name in used:
            continue
        # Only the coordinator publishes, and it is the one that sweeps: a temporary file is nobody's any more.
        if match[1] is None or int(match[1]) < current:
            _delete(store, f"{directory}/{name}")


def _delete_leftovers_of_starts(store: LocalStore, current: int) -> None:
    """What starts of the job that were killed left beside the generations' records.

    A newer start may be about to publish its record: it writes a temporary file that is gone anew, and its probe bears
    a higher number.
    """
    for name in store.list(DIRECTORY):
        match = _TEMPORARY.fullmatch(name)
        if match is not None and (match[1] is None or int(match[1]) <= current):
            _delete(store, f"{DIRECTORY}/{name}")


def _delete_checkpoint(store: LocalStore, directory: str) -> None:
    names = store.list(directory)
    for name in names:
        if MANIFEST_NAME.fullmatch(name):
            _delete(store, f"{directory}/{name}")
    store.sync(directory)
    faultpoints.reach("deleting")
    for name in names:
        if _OUR_FILE.fullmatch(name):
            _delete(store, f"{directory}/{name}")
    store.delete_directory(directory)


def _delete(store: LocalStore, name: str) -> None:
    try:
        store.delete(name)
    except OSError as error:
        log.warning("could not delete %s: %s; the next save tries again", name, error)
