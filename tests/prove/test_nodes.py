"""Nodes: apart from each other where the system allows it, and gone afterwards."""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from unbroken.errors import UnbrokenError
from unbroken.prove import nodes as module
from unbroken.prove.nodes import LoopbackNode, NamespaceNode, free_port, open_nodes


def made_by(marker):
    """Everything in the system that bears the proof's name."""
    return [path.name for place in ("/run/netns", "/sys/class/net") for path in Path(place).glob(f"*{marker[:6]}*")]


def can_make_namespaces():
    """Found out without the module under test."""
    name, bridge = f"unbroken-test-{os.getpid()}", f"ubt{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    bridged = subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)
    return made and bridged


def test_nodes_are_namespaces_where_they_can_be_and_leave_nothing():
    marker = secrets.token_hex(8)
    with pytest.raises(KeyboardInterrupt), open_nodes(2, marker) as nodes:
        assert [node.index for node in nodes] == [0, 1]
        if can_make_namespaces():
            assert all(isinstance(node, NamespaceNode) for node in nodes)
            assert len({node.address for node in nodes}) == 2
            assert made_by(marker)
            process = subprocess.Popen(nodes[1].enter(["cat"]), stdin=subprocess.PIPE)
            try:
                assert nodes[0].pids() == []
                while nodes[1].pids() != [process.pid]:
                    assert process.poll() is None
            finally:
                process.kill()
                process.communicate()
        else:
            assert all(isinstance(node, LoopbackNode) for node in nodes)
        raise KeyboardInterrupt
    assert made_by(marker) == []


@pytest.mark.parametrize("fails_at", range(1, 13))
def test_a_set_up_that_fails_half_way_falls_back_and_leaves_nothing(monkeypatch, fails_at):
    """`ip` may be there and refuse, in a container with few rights for one."""
    marker = secrets.token_hex(8)
    made, count = set(), 0

    def ip(*arguments):
        nonlocal count
        count += 1
        if count == fails_at:
            raise UnbrokenError("operation not permitted")
        if arguments[:2] in (("link", "add"), ("netns", "add")):
            made.add(arguments[2])
        if arguments[:2] in (("link", "del"), ("netns", "del")):
            if arguments[2] not in made:
                raise UnbrokenError("not there")
            made.remove(arguments[2])
        return ""

    monkeypatch.setattr(module, "_ip", ip)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    with open_nodes(2, marker) as nodes:
        assert nodes == [LoopbackNode(0, marker), LoopbackNode(1, marker)]
    assert made == set()


def test_one_node_or_the_users_wish_needs_no_namespace():
    for count, loopback in ((1, False), (2, True)):
        with open_nodes(count, "f" * 16, loopback=loopback) as nodes:
            assert [type(node) for node in nodes] == [LoopbackNode] * count


def test_a_free_port_can_be_listened_on():
    with open_nodes(1, "f" * 16) as nodes:
        assert 1024 < free_port(nodes[0]) < 65536
