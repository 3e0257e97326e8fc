import errno
import fcntl
import mmap
import os
import tempfile
import threading
from pathlib import Path

import pytest

from unbroken.store import local
from unbroken.store.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


def test_what_was_created_is_read_back(store):
    data = os.urandom(100_000)
    store.create("step-1/g0001-rank-00000.safetensors", data)
    part = bytearray(1000)
    store.read_into("step-1/g0001-rank-00000.safetensors", 500, memoryview(part))
    assert bytes(part) == data[500:1500]
    assert store.size("step-1/g0001-rank-00000.safetensors") == 100_000
    assert store.list("step-1") == ["g0001-rank-00000.safetensors"]


def test_create_and_publish_never_replace(store):
    for write in (store.create, store.publish):
        write(f"a/{write.__name__}", b"first")
        with pytest.raises(FileExistsError):
            write(f"a/{write.__name__}", b"second")
        assert store.read(f"a/{write.__name__}", 100) == b"first"
    assert not [name for name in store.list("a") if name.startswith(".tmp")]


def test_of_racing_publishers_one_wins_and_its_bytes_are_whole(store):
    won = []
    go = threading.Barrier(8)

    def publish(index):
        go.wait()
        try:
            store.publish("x/manifest.json", bytes([index]) * 10_000)
            won.append(index)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(won) == 1
    assert store.read("x/manifest.json", 1 << 20) == bytes(won) * 10_000


def test_without_hard_links_publishing_is_still_exclusive(store, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.publish("a/m", b"first")
    with pytest.raises(FileExistsError):
        store.publish("a/m", b"second")
    assert store.read("a/m", 100) == b"first"


def test_a_failed_write_leaves_no_file(store, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.create("step-1/file", b"data")
    assert store.list("step-1") == []


def test_a_name_whose_directory_cannot_be_synced_is_taken_back(store, monkeypatch):
    """A publish that failed late left its name: the save counted as failed, its data went, the manifest stayed."""
    store.create("step-1/file", b"data")
    real = local._sync_directory
    failures = [OSError(errno.EIO, "Input/output error")]

    def once(path):
        if path.name == "step-1" and failures and (path / "manifest.json").exists():
            raise failures.pop()
        real(path)

    monkeypatch.setattr(local, "_sync_directory", once)
    with pytest.raises(OSError, match="Input/output error"):
        store.publish("step-1/manifest.json", b"{}")
    assert store.list("step-1") == ["file"]
    store.publish("step-1/manifest.json", b"{}")


def test_a_create_that_fails_early_leaves_a_file_of_that_name_alone(store, monkeypatch):
    store.create("step-1/file", b"data")

    def broken(_path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local, "_sync_directory", broken)
    with pytest.raises(OSError, match="Input/output error"):
        store.create("step-1/file", b"other")
    assert store.read("step-1/file", 10) == b"data"


def test_a_temporary_file_that_a_sweep_took_is_written_again(store, monkeypatch):
    real, taken = os.link, []

    def after_a_sweep(temporary, path):
        if not taken:
            taken.append(temporary)
            temporary.unlink()
        real(temporary, path)

    monkeypatch.setattr(os, "link", after_a_sweep)
    store.publish("generations/0001.json", b"{}")
    assert taken
    assert store.list("generations") == ["0001.json"]


def test_the_root_is_made_with_the_directories_above_it(tmp_path):
    store = LocalStore(tmp_path / "a" / "b")
    store.create_root()
    store.create_root()
    assert store.root.is_dir()


def test_a_directory_that_vanishes_before_the_file_is_created_is_made_again(store, monkeypatch):
    real, removed = os.open, []

    def after_a_sweep(path, *rest):
        if "step-1" in str(path) and not removed:
            removed.append(True)
            (store.root / "step-1").rmdir()
        return real(path, *rest)

    monkeypatch.setattr(os, "open", after_a_sweep)
    store.create("step-1/file", b"data")
    assert removed
    assert store.read("step-1/file", 10) == b"data"


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "a/.hidden", "a/b\x00c", "~/x", "a/..", "a\nb"]
)
def test_names_that_could_lead_outside_are_refused(store, name):
    for act in (lambda: store.create(name, b""), lambda: store.read(name, 10), lambda: store.delete(name)):
        with pytest.raises(ValueError, match="plain relative name"):
            act()


def test_links_are_not_followed(store, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    store.root.mkdir()
    (store.root / "file").symlink_to(secret)
    (store.root / "step-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        store.read("file", 100)
    with pytest.raises(ValueError, match="link"):
        store.create("step-1/file", b"")
    assert store.size("file") is None
    assert store.list("") == []


def test_only_regular_files_are_read(store):
    store.root.mkdir()
    os.mkfifo(store.root / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        store.read("pipe", 10)


def test_a_file_that_ends_early_is_an_error(store):
    store.create("file", b"abc")
    with pytest.raises(EOFError, match="2 bytes short"):
        store.read_into("file", 1, memoryview(bytearray(4)))


def test_a_record_that_is_too_large_is_not_read(store):
    store.create("file", b"abcdef")
    with pytest.raises(ValueError, match="has 6 bytes"):
        store.read("file", 5)


def test_a_file_created_in_parts_is_whole_or_not_there(tmp_path):
    store = LocalStore(tmp_path / "root")
    store.create_in_parts("step-1/file", iter([b"one", memoryview(b"two"), b""]))
    assert (tmp_path / "root/step-1/file").read_bytes() == b"onetwo"
    with pytest.raises(FileExistsError):
        store.create_in_parts("step-1/file", [b"other"])

    def parts():
        yield b"half"
        raise EOFError("no more")

    with pytest.raises(EOFError, match="no more"):
        store.create_in_parts("step-1/second", parts())
    assert store.list("step-1") == ["file"]


def on_a_page(size: int) -> memoryview:
    """Random bytes in memory that begins on a page, as an arena does."""
    memory = mmap.mmap(-1, size)
    memory[:] = os.urandom(size)
    return memoryview(memory)


@pytest.fixture(params=["disk", "memory"])
def any_store(request, tmp_path):
    """On a disk, and on a file system that may know no way past the page cache."""
    if request.param == "disk":
        yield LocalStore(tmp_path / "run")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield LocalStore(Path(directory) / "run")


@pytest.mark.parametrize("more", [0, 1, local.PAGE_BYTES - 1, local.PAGE_BYTES, 3 * local.PAGE_BYTES + 17])
@pytest.mark.parametrize("begin", [0, 64])
def test_large_data_is_written_past_the_page_cache_where_that_can_be_and_always_whole(any_store, more, begin):
    data = on_a_page(local.DIRECT_BYTES + more + begin)[begin:]
    any_store.create("a/b", data)
    assert any_store.read("a/b", 1 << 30) == bytes(data)


def test_what_a_direct_write_leaves_is_written_by_the_usual_way(store, monkeypatch):
    """A system that takes the flag and refuses the second write."""
    write, calls = os.write, []

    def refuse_second(fd, data):
        calls.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if calls == [True, True]:
            raise OSError(errno.EINVAL, "no")
        return write(fd, data)

    monkeypatch.setattr(local, "CHUNK_BYTES", local.DIRECT_BYTES)
    monkeypatch.setattr(os, "write", refuse_second)
    data = on_a_page(3 * local.DIRECT_BYTES + 5)
    store.create("a/b", data)
    assert calls[:3] == [True, True, False] and True not in calls[2:]
    assert store.read("a/b", 1 << 30) == bytes(data)


def test_a_full_disk_is_told_from_a_system_that_writes_in_one_way_only(store, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        store.create("a/b", on_a_page(local.DIRECT_BYTES))
    assert store.size("a/b") is None
