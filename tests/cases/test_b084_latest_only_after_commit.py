"""B084: "latest" moved before the asynchronous write was durable, and the old checkpoint was already deleted.

Right: there is no pointer; a checkpoint is its manifest, written after the bytes; deletion comes after the commit. A
process with a slow disk is killed between `save()` and the end of its write, with keep=1. Also B086 (the pointer
named a later step than the one saved) and B132 (a load right after an asynchronous save).
"""

from __future__ import annotations

import os
import threading

import torch

import unbroken


def values(path):
    weights = torch.zeros(3)
    restored = unbroken.Checkpointer(path, {"weights": weights}).restore()
    return restored.step, weights.tolist()


def test_killed_before_the_write_is_durable_the_old_one_is_there(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            die_in_the_second_write(tmp_path, writer)
        finally:
            os._exit(1)  # never go on as a second pytest
    os.close(writer)
    assert os.read(reader, 1) == b"x", "the second write has begun"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert not (tmp_path / "step-2/manifest.json").exists()
    assert values(tmp_path) == (1, [1, 1, 1])


def die_in_the_second_write(path, writer):
    weights = torch.ones(3)
    ckpt = unbroken.Checkpointer(path, {"weights": weights}, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=1))
    ckpt.restore()
    ckpt.step()
    ckpt.wait()
    ckpt._session.store.create_in_parts = lambda *_: (os.write(writer, b"x"), threading.Event().wait())
    weights.fill_(2)
    ckpt.step()
    threading.Event().wait()


def test_what_is_saved_is_the_step_of_the_save_not_of_its_end(tmp_path):
    weights = torch.zeros(3)
    ckpt = unbroken.Checkpointer(tmp_path, {"weights": weights}, every=unbroken.Every(steps=10))
    ckpt.restore()
    go_on = threading.Event()
    real = ckpt._session.store.create_in_parts
    ckpt._session.store.create_in_parts = lambda name, data: (go_on.wait(30), real(name, data))
    for step in range(1, 13):
        weights.fill_(step)
        ckpt.step()
    go_on.set()
    ckpt.close()
    assert values(tmp_path) == (10, [10, 10, 10])
