"""A model of what a file system may hold after a crash.

**The model.** A file has contents, a directory has names. Each is durable up to its last fsync and loses nothing of
that. Everything since may or may not have reached the disk:

- *Contents.* `fsync(file)` makes the bytes of the file durable, not its name. What was written since survives as any
  prefix, cut at any byte; or not at all, so that a new file is empty; or with its full size, but in any of its blocks
  of 4096 bytes the old bytes and, where there were none, zeros or foreign bytes (the size reached the disk, the
  data did not).
- *Names.* `fsync(directory)` makes the names in that directory durable, not the directory's own name, and not the
  contents of its files. Each name by itself is what it was at the last fsync or what any later call made of it: so
  creations, links, removals and new directories survive in any subset, whatever their order was, and also when the
  contents they lead to do not. Only a rename is one change: its two names survive together or neither does.
- A crash may come after any call, and inside a write.
- A file that no surviving name leads to is gone, and so is all that lies in a lost directory.

A killed process, on a machine that lives on, is the case in which everything survives.

**Sources.** T. S. Pillai et al., "All File Systems Are Not Created Equal: On the Complexity of Crafting
Crash-Consistent Applications", OSDI 2014 (ALICE): persistence properties of ext2/3/4, btrfs, xfs, reiserfs, its table
1: appends are torn and reordered, directory operations are reordered, renames are atomic; the abstract persistence
model that states are enumerated from. POSIX and Linux `fsync(2)`: "does not necessarily ensure that the entry in the
directory containing the file has also reached disk. For that an explicit fsync() on a file descriptor for the directory
is also needed." Linux `Documentation/admin-guide/ext4.rst`: `data=writeback` keeps no order between data and metadata,
`auto_da_alloc` rescues replace-by-rename only.
The model is weaker than any of these file systems by itself: ext4 commits all names of its journal at once.

What is not modelled: bits that rot, a disk that lies about flushes, directories torn inside, renames between
directories that are cut in half (we have none).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import xxhash

from crash.recorder import Call

BLOCK = 4096
"""Bytes that reach the disk together."""
ROOT = 0
"""The number of the directory everything lies in. It is durable."""

Tree: TypeAlias = dict[str, bytes | None]
"""What lies in a directory: contents by path, None for a directory."""
Cuts: TypeAlias = Callable[[int], list[int]]
"""Where a stretch of so many unsynced bytes may be cut."""


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes written to a file, or its size set, and not synced yet."""

    offset: int
    data: bytes | None
    """None: a truncate to `offset` bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """The contents of a file."""

    durable: bytes = b""
    changes: tuple[Change, ...] = ()
    """Since the last fsync, in order."""


@dataclass(frozen=True, slots=True)
class Version:
    """What a name led to at some time since the last fsync of its directory."""

    inode: int | None
    """None: the name was not there."""
    change: int
    """Number of the call that made it so; both names of a rename have the same. -1: durable."""


Names: TypeAlias = dict[str, tuple[Version, ...]]
"""By name, its versions, the durable one first."""


@dataclass
class FileSystem:
    """Files and directories with all that may yet be lost. `apply` adds a call; `copy` before trying another."""

    files: dict[int, File] = field(default_factory=dict)
    directories: dict[int, Names] = field(default_factory=lambda: {ROOT: {}})

    def copy(self) -> FileSystem:
        """An independent copy."""
        return FileSystem(dict(self.files), {inode: dict(names) for inode, names in self.directories.items()})

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for file systems that behave the same."""
        directories = ((inode, tuple(sorted(names.items()))) for inode, names in sorted(self.directories.items()))
        return tuple(sorted(self.files.items(), key=lambda item: item[0])), tuple(directories)

    def apply(self, call: Call, number: int) -> None:
        """Make `call`, which is unlike any other by `number` (above zero). Raises LookupError where it would fail."""
        if call.kind == "sync":
            self._sync(self._resolve(call.path))
            return
        if call.kind in ("write", "truncate"):
            inode = self._resolve(call.path)
            change = Change(call.offset, call.data if call.kind == "write" else None)
            self.files[inode] = replace(self.files[inode], changes=(*self.files[inode].changes, change))
            return
        parent, name = self._place(call.path)
        if call.kind in ("mkdir", "create"):
            self._require(self._now(parent, name) is None, call)
            self._set(parent, name, number, number)
            if call.kind == "mkdir":
                self.directories[number] = {}
            else:
                self.files[number] = File()
            return
        inode = self._resolve(call.path)
        if call.kind in ("link", "rename"):
            other, target = self._place(call.target)
            self._require(call.kind == "rename" or self._now(other, target) is None, call)
            self._require(call.kind == "link" or other == parent, call)
            self._set(other, target, inode, number)
        if call.kind == "rmdir":
            self._require(not any(versions[-1].inode for versions in self.directories[inode].values()), call)
        if call.kind != "link":
            self._set(parent, name, None, number)

    def now(self) -> Tree:
        """What the running system sees."""
        whole = FileSystem(
            {inode: File(_written(file.durable, file.changes)) for inode, file in self.files.items()},
            {
                inode: {name: versions[-1:] for name, versions in names.items()}
                for inode, names in self.directories.items()
            },
        )
        return next(whole.crashes(lambda size: [size]))

    def crashes(self, cuts: Cuts, every: Cuts | None = None) -> Iterator[Tree]:
        """All that may be found after a crash now; the same tree may come more than once.

        cuts   where unsynced contents are cut, in all combinations with everything else
        every  more places, tried for one file at a time while the other files are lost or whole
        """
        yield from self._crashes(ROOT, "", cuts)
        if every is None:
            return
        for inode, file in self.files.items():
            for contents in dict.fromkeys(survivors(file, every)) if file.changes else ():
                alone = FileSystem({**self.files, inode: File(contents)}, self.directories)
                yield from alone._crashes(ROOT, "", lambda size: [size])

    def _crashes(self, inode: int, prefix: str, cuts: Cuts) -> Iterator[Tree]:
        for names in _surviving_names(self.directories[inode]):
            parts: list[list[Tree]] = []
            for name, child in names.items():
                path = f"{prefix}{name}"
                if child in self.files:
                    contents = dict.fromkeys(survivors(self.files[child], cuts))
                    parts.append([{path: content} for content in contents])
                else:
                    inner = self._crashes(child, f"{path}/", cuts)
                    parts.append([{path: None, **tree} for tree in inner])
            for combination in itertools.product(*parts):
                yield {path: content for tree in combination for path, content in tree.items()}

    def _sync(self, inode: int) -> None:
        if inode in self.files:
            file = self.files[inode]
            self.files[inode] = File(_written(file.durable, file.changes))
            return
        names = self.directories[inode]
        self.directories[inode] = {
            name: (Version(versions[-1].inode, -1),)
            for name, versions in names.items()
            if versions[-1].inode is not None
        }

    def _now(self, directory: int, name: str) -> int | None:
        versions = self.directories[directory].get(name)
        return versions[-1].inode if versions else None

    def _set(self, directory: int, name: str, inode: int | None, change: int) -> None:
        versions = self.directories[directory].get(name) or (Version(None, -1),)
        self.directories[directory][name] = (*versions, Version(inode, change))

    def _place(self, path: str) -> tuple[int, str]:
        directory, _, name = path.rpartition("/")
        return self._resolve(directory or "."), name

    def _resolve(self, path: str) -> int:
        inode = ROOT
        for part in path.split("/") if path != "." else []:
            found = self._now(inode, part) if inode in self.directories else None
            if found is None:
                raise LookupError(f"there is no {path}")
            inode = found
        return inode

    def _require(self, holds: bool, call: Call) -> None:
        if not holds:
            raise LookupError(f"{call} would fail")


def digest(tree: Tree) -> bytes:
    """Equal for equal trees, in little room: there are hundreds of thousands."""
    state = xxhash.xxh3_128()
    for path, content in sorted(tree.items()):
        state.update(f"{path}\0{-1 if content is None else len(content)}\0".encode())
        state.update(content or b"")
    return state.digest()


def survivors(file: File, cuts: Cuts) -> Iterator[bytes]:
    """What may be found in a file after a crash: at least what is durable, of the rest what `cuts` and blocks allow."""
    if not file.changes:
        yield file.durable
        return
    content = file.durable
    for change in file.changes:
        yield content
        if change.data is not None:
            for cut in cuts(len(change.data)):
                yield _written(content, [Change(change.offset, change.data[:cut])])
        content = _written(content, [change])
    yield content
    yield from _lost_blocks(file.durable, content)


def _lost_blocks(before: bytes, after: bytes) -> Iterator[bytes]:
    """The size of the new contents; in some of the blocks that changed the old bytes, then zeros or foreign ones."""
    blocks = [
        begin for begin in range(0, len(after), BLOCK) if before[begin : begin + BLOCK] != after[begin : begin + BLOCK]
    ]
    some = [blocks[:1], blocks[1:], blocks] if len(blocks) > 3 else _subsets(blocks)
    for lost in some:
        for foreign in (b"\0", b"\xa5"):
            content = bytearray(after)
            for begin in lost:
                end = min(begin + BLOCK, len(after))
                old = before[begin:end]
                content[begin:end] = old + foreign * (end - begin - len(old))
            yield bytes(content)


def _subsets(items: list[int]) -> list[list[int]]:
    return [[*chosen] for size in range(1, len(items) + 1) for chosen in itertools.combinations(items, size)]


def _surviving_names(names: Names) -> Iterator[dict[str, int]]:
    """Every set of names a directory may be left with, and where they lead."""
    for chosen in itertools.product(*(range(len(versions)) for versions in names.values())):
        if _renames_are_whole(names, chosen):
            found = {name: versions[index].inode for (name, versions), index in zip(names.items(), chosen, strict=True)}
            yield {name: inode for name, inode in found.items() if inode is not None}


def _renames_are_whole(names: Names, chosen: tuple[int, ...]) -> bool:
    survived: dict[int, bool] = {}
    for versions, index in zip(names.values(), chosen, strict=True):
        for position, version in enumerate(versions):
            if version.change >= 0 and survived.setdefault(version.change, position <= index) != (position <= index):
                return False
    return True


def _written(content: bytes, changes: tuple[Change, ...] | list[Change]) -> bytes:
    for change in changes:
        if change.data is None:
            content = content[: change.offset].ljust(change.offset, b"\0")
        else:
            end = change.offset + len(change.data)
            content = content[: change.offset].ljust(change.offset, b"\0") + change.data + content[end:]
    return content
