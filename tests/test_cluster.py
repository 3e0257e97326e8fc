import threading

import pytest
import torch.distributed as dist

from ranks import channels, on_all
from unbroken import errors
from unbroken.cluster import Cluster, Message, connect
from unbroken.errors import DamagedCheckpoint, DeadlineExceeded, PeerFailed, UsageError


def test_an_exchange_gives_every_rank_all_messages():
    got = on_all(channels(4), lambda c: c.exchange("p", Message(payload=bytes([c.rank])), 10))
    assert [[m.payload for m in messages] for messages in got] == [[b"\0", b"\1", b"\2", b"\3"]] * 4


def test_a_missing_rank_is_named_on_every_other():
    present = channels(4)[:2] + channels(4)[3:]
    store = present[0].store
    for channel in present:
        channel.store = store
    for error in on_all(present, lambda c: c.exchange("restore/0", Message(), 0.2)):
        assert isinstance(error, DeadlineExceeded)
        assert "rank(s) 2 did not come to phase 'restore/0' within 0.2 s" in str(error)


def test_an_error_on_one_rank_is_raised_on_all_and_names_it():
    def act(channel):
        def fail_on_two():
            if channel.rank == 2:
                raise DamagedCheckpoint("file x is cut")
            return channel.rank

        return channel.agree("p", fail_on_two, 10)

    results = on_all(channels(3), act)
    assert all(isinstance(result, DamagedCheckpoint) for result in results)
    assert str(results[0]) == "rank 2: file x is cut"
    assert str(results[2]) == "file x is cut"


def test_a_failing_disk_or_a_mistake_on_one_rank_is_heard_on_all():
    def act(channel):
        def fail_on_one():
            if channel.rank == 1:
                raise PermissionError("not allowed")

        return channel.agree("p", fail_on_one, 10)

    results = on_all(channels(2), act)
    assert [str(result) for result in results] == [
        "rank 1: PermissionError: not allowed",
        "PermissionError: not allowed",
    ]
    assert all(isinstance(result, errors.UnbrokenError) for result in results)


def test_agreeing_returns_each_ranks_own_result():
    assert on_all(channels(3), lambda c: c.agree("p", lambda: c.rank * 2, 10)) == [0, 2, 4]


def test_a_decision_of_rank_0_reaches_all_and_so_does_its_error():
    assert on_all(channels(3), lambda c: c.decide("p", lambda: b"yes", 10)) == [b"yes"] * 3

    def fail():
        raise errors.NoUsableCheckpoint("none")

    assert all(isinstance(e, errors.NoUsableCheckpoint) for e in on_all(channels(3), lambda c: c.decide("p", fail, 10)))


def test_a_message_cannot_name_any_class_but_ours():
    channel, other = channels(2)
    other.post("p/from/1", b'{"error":"x","error_class":"os"}')
    with pytest.raises(PeerFailed, match="rank 1: x"):
        channel.agree("p", lambda: None, 10)


def test_a_stopped_channel_ends_its_waits():
    (channel,) = channels(1)
    ended = []

    def wait():
        with pytest.raises(PeerFailed, match="was closed"):
            channel.read("never", 60, "x")
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    channel.stopped.set()
    waiting.join(30)
    assert ended


def test_forgotten_keys_are_gone():
    (channel,) = channels(1)
    channel.post("k", b"v")
    assert channel.has("k")
    channel.forget(["k"])
    assert not channel.has("k")


def test_a_launcher_without_a_process_group_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"started 4 ranks.*init_process_group"):
        connect(1)


def test_a_single_process_needs_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cluster = connect(1)
    assert (cluster.rank, cluster.world_size) == (0, 1)


def test_the_private_name_we_lean_on_exists():
    assert callable(getattr(dist.distributed_c10d, "_get_default_store", None)), (
        "torch dropped _get_default_store; cluster._connect_ranks needs another way to find rank 0"
    )


def test_lost_rank_0_is_an_error_not_a_wait():
    class Gone:
        tries = 0

        def check(self, _keys):
            self.tries += 1
            raise dist.DistNetworkError("Broken pipe")

    channel = Cluster(3, 4, Gone()).channel("test", threading.Event())
    with pytest.raises(PeerFailed, match="rank 3 lost the control channel"):
        channel.read("k", 60, "x")
    with pytest.raises(PeerFailed, match="Broken pipe"):
        channel.has("k")
    assert channel.store.tries == 1, "a lost connection is not tried again"
