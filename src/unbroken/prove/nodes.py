"""Nodes on one machine, for a job to lose.

Two kinds. In a network namespace a node has an address and a link of its own, so that losing it resets its
connections as a powered-off machine's would; this needs root and `ip` (iproute2). Elsewhere a node is nothing but its
processes, all on loopback. Namespaces are named after the proof, hold no address of the host and are always removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from unbroken.errors import UnbrokenError
from unbroken.prove.processes import marked, on_node

log = logging.getLogger(__name__)

COMMAND_S = 20.0
"""Deadline of one `ip` command and of the test of the link, in seconds."""
NAMESPACE_PORTS = range(20000, 30000)
"""Below the range from which the kernel takes ports for outgoing connections."""

# Runs inside two namespaces: can one reach the other? Firewalls that filter bridges say no.
_LISTEN = (
    "import socket, sys; server = socket.create_server((sys.argv[1], 29999)); server.settimeout(10); "
    "print('ready', flush=True); server.accept()"
)
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 29999), timeout=5)"


class Node(Protocol):
    """One simulated machine. Used by one thread."""

    @property
    def kind(self) -> str:
        """What stands for a machine, for the report."""

    @property
    def index(self) -> int:
        """From 0 on; torchrun's node rank."""

    @property
    def address(self) -> str:
        """Where the other nodes reach it."""

    @property
    def interface(self) -> str:
        """Name of the network interface that has the address, for gloo."""

    def enter(self, command: Sequence[str]) -> list[str]:
        """`command` as it must be started to run on this node."""

    def pids(self) -> list[int]:
        """Every live process that runs on this node."""


@dataclass(frozen=True, slots=True)
class LoopbackNode:
    """A node that is only its processes; it shares the machine's network."""

    index: int
    marker: str
    """Of the proof: it tells the node's processes from all others."""
    address: str = "127.0.0.1"
    interface: str = "lo"
    kind: str = "processes on loopback"

    def enter(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def pids(self) -> list[int]:
        return on_node(marked(self.marker), self.index)


@dataclass(frozen=True, slots=True)
class NamespaceNode:
    """A node with a network of its own."""

    index: int
    name: str
    """Of the namespace."""
    address: str
    interface: str = "eth0"
    kind: str = "network namespaces"

    def enter(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


@contextlib.contextmanager
def open_nodes(count: int, marker: str, *, loopback: bool = False) -> Iterator[list[Node]]:
    """`count` nodes, in namespaces where that is possible; they are gone when the block ends, however it ends.

    marker    of the proof; its first six characters must be unique on this machine
    loopback  True: do not try namespaces
    """
    with contextlib.ExitStack() as stack:
        nodes: list[Node] | None = None
        # A single node has nobody to be cut off from.
        if count > 1 and not loopback and os.geteuid() == 0 and shutil.which("ip"):
            try:
                nodes = stack.enter_context(_namespaces(count, marker[:6]))
            except UnbrokenError as error:
                log.info("nodes share the loopback network: %s", error)
        yield nodes if nodes is not None else [LoopbackNode(index, marker) for index in range(count)]


def free_port(node: Node) -> int:
    """A port that nobody listens on at `node`, for a launcher to use right away."""
    if isinstance(node, NamespaceNode):
        return NAMESPACE_PORTS[int.from_bytes(os.urandom(4)) % len(NAMESPACE_PORTS)]
    with socket.socket() as probe:
        probe.bind((node.address, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _namespaces(count: int, name: str) -> Iterator[list[Node]]:
    """Namespaces on one bridge. Raises UnbrokenError if the system does not let us, after removing what was made."""
    bridge = f"ub{name}"
    nodes = [NamespaceNode(index, f"{bridge}n{index}", f"10.77.0.{index + 1}") for index in range(count)]
    try:
        # The bridge gets no address: nothing of the host's own network can collide with ours.
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for node in nodes:
            _connect(node, bridge)
        _test_link(nodes[0], nodes[-1])
        yield [*nodes]
    finally:
        _remove(nodes, bridge)


def _connect(node: NamespaceNode, bridge: str) -> None:
    outside, inside = f"{bridge}v{node.index}", f"{bridge}w{node.index}"
    _ip("netns", "add", node.name)
    _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
    _ip("link", "set", inside, "netns", node.name)
    _ip("link", "set", outside, "master", bridge, "up")
    _ip("-n", node.name, "link", "set", inside, "name", node.interface)
    _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.interface)
    _ip("-n", node.name, "link", "set", node.interface, "up")
    _ip("-n", node.name, "link", "set", "lo", "up")


def _test_link(first: NamespaceNode, last: NamespaceNode) -> None:
    listen = first.enter([sys.executable, "-Sc", _LISTEN, first.address])
    with subprocess.Popen(listen, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            _run(last.enter([sys.executable, "-Sc", _CONNECT, first.address]))
        finally:
            server.kill()


def _remove(nodes: Sequence[NamespaceNode], bridge: str) -> None:
    """Undo whatever of `_namespaces` was done; a deleted namespace takes its end of the link with it."""
    for node in nodes:
        with contextlib.suppress(UnbrokenError):
            _ip("netns", "del", node.name)
        with contextlib.suppress(UnbrokenError):
            _ip("link", "del", f"{bridge}v{node.index}")
    with contextlib.suppress(UnbrokenError):
        _ip("link", "del", bridge)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    """Output of a command. Raises UnbrokenError if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnbrokenError(f"`{' '.join(command)}`: {error}") from error
    if done.returncode != 0:
        raise UnbrokenError(f"`{' '.join(command)}`: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
