"""B128: an asynchronous save of CPU tensors wrote values of a later step.

The bug: the background writer read live tensors. Right: the file says what was there when the save was made. Also
B066 (state dicts alias live tensors), B129 (a slow writer mixed steps) and B131 (staging buffers reused too early).
"""

from __future__ import annotations

import threading

import torch

import unbroken


def test_the_file_says_what_was_there_at_the_save(tmp_path):
    weight = torch.ones(1000)
    ckpt = unbroken.Checkpointer(tmp_path, {"weight": weight}, every=unbroken.Every(steps=1), keep=None)
    ckpt.restore()
    go_on = threading.Event()
    real = ckpt._session.store.create_in_parts
    ckpt._session.store.create_in_parts = lambda name, data: (go_on.wait(30), real(name, data))
    ckpt.step()
    weight += 1
    ckpt.step()
    weight += 1
    go_on.set()
    ckpt.close()
    for step in (1, 2):
        assert saved(tmp_path, step) == {float(step)}


def test_more_saves_than_buffers_wait_instead_of_overwriting(tmp_path):
    weight = torch.zeros(1000)
    ckpt = unbroken.Checkpointer(tmp_path, {"weight": weight}, every=unbroken.Every(steps=1), keep=None)
    ckpt.restore()
    real = ckpt._session.store.create_in_parts
    paces = threading.Semaphore(0)

    def paced(name, data):
        if name.endswith(".safetensors"):
            assert paces.acquire(timeout=30)
        real(name, data)

    ckpt._session.store.create_in_parts = paced
    pacing = threading.Thread(target=lambda: [paces.release() for _ in range(8)])
    for step in range(1, 9):
        weight.fill_(step)
        if step == 3:
            pacing.start()
        ckpt.step()
    ckpt.close()
    pacing.join()
    assert [saved(tmp_path, step) for step in range(1, 9)] == [{float(step)} for step in range(1, 9)]


def saved(path, step):
    from safetensors.torch import load_file

    return set(load_file(path / f"step-{step}/g0001-rank-00000.safetensors")["weight"].tolist())
