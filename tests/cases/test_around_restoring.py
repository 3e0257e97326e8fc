"""Cases around the must cases: what else goes wrong between a restore and the first step, each with its id.

Each test begins with how the bug worked. All run in one process; what needs ranks is in the must cases' files.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from toy import make_job, make_model, train


def save(path, objects, **options):
    ckpt = unbroken.Checkpointer(path, objects, **options)
    ckpt.restore()
    ckpt.save()
    ckpt.close()


def restore(path, objects):
    ckpt = unbroken.Checkpointer(path, objects)
    restored = ckpt.restore()
    ckpt.close()
    return restored


def test_b034_b043_what_constructors_do_to_rng_and_rates_is_undone(tmp_path):
    """A helper seeded again after the load; a scheduler made after it put the rate back to its start.

    Everything is restored by one call after all objects exist, RNG last of all.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    torch.manual_seed(12)
    torch.rand(5)
    save(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    expected = torch.rand(3)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    torch.manual_seed(99)
    restore(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    assert torch.equal(torch.rand(3), expected)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert scheduler.last_epoch == 3


def test_b030_a_validation_loop_after_a_resume_runs_all_its_batches(tmp_path):
    """The restored position of the training loader leaked into validation, which ran one batch only."""
    validation = DataLoader(TensorDataset(torch.arange(80.0)), 4)
    job = make_job(tmp_path, 0, 1, every=unbroken.Every(steps=1))
    job.ckpt.restore()
    train(job, 5).ckpt.close()
    again = make_job(tmp_path, 0, 1)
    again.ckpt.restore()
    assert sum(1 for _ in validation) == 20
    assert sum(1 for _ in again.loader) == 24 - 5
    again.ckpt.close()


def test_b053_b169_counts_are_of_optimizer_steps_and_a_finished_run_does_nothing_more(tmp_path):
    """The start epoch was counted in micro-batches, so that the resumed job ended with no step, or did too many."""
    total = 6
    for start in range(3):
        loader = unbroken.resumable(DataLoader(TensorDataset(torch.arange(16.0)), 2), seed=1)
        ckpt = unbroken.Checkpointer(tmp_path, {"loader": loader, "w": torch.zeros(1)}, every=unbroken.Every(steps=1))
        ckpt.restore()
        begun = ckpt.global_step
        until = (2, total, total)[start]
        seen = []
        while ckpt.global_step < until:
            for micro, (rows,) in enumerate(loader):
                seen += rows.tolist()
                ckpt.step(accumulating=micro % 2 == 0)
                if ckpt.global_step >= until:
                    break
        ckpt.close()
        assert (begun, ckpt.global_step) == ((0, 2), (2, total), (total, total))[start]
        assert len(seen) == 4 * (until - begun)
        if start == 1:
            assert seen[0] == 8, "steps 3 and 4 finish the first epoch"


def test_b057_a_group_that_is_missing_at_the_restore_is_named(tmp_path):
    """Groups added during training are not there in a fresh optimizer; the load failed with a count."""
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": list(model[5].parameters()), "lr": 0.01})
    save(tmp_path, {"model": model, "optimizer": optimizer})
    model = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(unbroken.StateMismatch, match=r"5\.(weight|bias)"):
        restore(tmp_path, {"model": model, "optimizer": optimizer})


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_b069_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    """Tied entries were absent from the file, and the restored model had two copies."""
    saved = Tied(tied=True)
    save(tmp_path, {"model": saved})
    live = Tied(tied=True)
    restore(tmp_path, {"model": live})
    assert live.head.weight is live.embedding.weight
    assert torch.equal(live.head.weight, saved.head.weight)
    (file,) = tmp_path.glob("step-0/*.safetensors")
    assert file.stat().st_size < 20_000
    assert file.read_bytes().count(b'"model/') == 1


def test_b068_weights_that_only_look_tied_are_both_kept(tmp_path):
    """The config said tied, the tensors had drifted apart; the head was dropped and rebuilt from the embedding."""
    saved = Tied(tied=False)
    save(tmp_path, {"model": saved})
    live = Tied(tied=False)
    restore(tmp_path, {"model": live})
    assert torch.equal(live.head.weight, saved.head.weight)
    assert not torch.equal(live.head.weight, live.embedding.weight)


def test_b072_b073_weights_average_and_its_counter_come_back_each_as_itself(tmp_path):
    """Only the average was saved, became the model, and its warm-up began anew."""
    model = make_model()
    ema = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(7):
        with torch.no_grad():
            [p.add_(1) for p in model.parameters()]
        ema.update_parameters(model)
    save(tmp_path, {"model": model, "ema": ema})
    live = make_model()
    live_ema = torch.optim.swa_utils.AveragedModel(live)
    restore(tmp_path, {"model": live, "ema": live_ema})
    for saved, restored in ((model, live), (ema, live_ema)):
        for a, b in zip(saved.state_dict().values(), restored.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert live_ema.n_averaged == 7


@pytest.mark.parametrize("saved_compiled", [False, True])
@pytest.mark.parametrize("live_compiled", [False, True])
def test_b137_b138_compiled_and_eager_models_have_the_same_names(tmp_path, saved_compiled, live_compiled):
    """Keys with `_orig_mod.` matched nothing, and the run went on from fresh weights without a word."""

    def build(compiled):
        model = make_model()
        return torch.compile(model, backend="eager") if compiled else model

    saved, live = build(saved_compiled), build(live_compiled)
    save(tmp_path, {"model": saved})
    restore(tmp_path, {"model": live})
    for a, b in zip(saved.parameters(), live.parameters(), strict=True):
        assert torch.equal(a, b)


class WithMasters(torch.optim.SGD):
    """bf16 parameters, fp32 masters kept as optimizer state."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "master" not in state:
                    state["master"] = p.float()
                state["master"] -= group["lr"] * p.grad.float()
                p.copy_(state["master"])


def test_b003_b140_fp32_masters_of_bf16_weights_do_not_drift(tmp_path):
    """Masters were rebuilt from the bf16 weights at each resume, or cast to them by load_state_dict."""

    def build():
        torch.manual_seed(0)
        weights = nn.Parameter(torch.randn(64).bfloat16())
        return {"weights": weights, "optimizer": WithMasters([weights], lr=1e-3)}

    def go(objects, steps):
        for _ in range(steps):
            objects["weights"].grad = (objects["weights"].detach() * 0.37).clone()
            objects["optimizer"].step()

    straight = build()
    go(straight, 15)
    for part in range(3):
        objects = build()
        ckpt = unbroken.Checkpointer(tmp_path, objects)
        assert (ckpt.restore() is None) == (part == 0)
        go(objects, 5)
        for _ in range(5):
            ckpt.step()
        ckpt.save()
        ckpt.close()
    assert torch.equal(objects["weights"], straight["weights"])
    masters = [o["optimizer"].state[o["weights"]]["master"] for o in (objects, straight)]
    assert masters[0].dtype == torch.float32
    assert torch.equal(*masters)


def test_b066_b165_what_was_restored_owns_its_memory(tmp_path):
    """State taken from a file stayed mapped to it, and saving over the file changed the weights."""
    model = make_model()
    save(tmp_path, {"model": model})
    live = make_model()
    before = [p.data_ptr() for p in live.parameters()]
    restore(tmp_path, {"model": live})
    assert [p.data_ptr() for p in live.parameters()] == before, "restored into the live storage"
    expected = copy.deepcopy(live.state_dict())
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert all(torch.equal(a, b) for a, b in zip(expected.values(), live.state_dict().values(), strict=True))


def test_b083_a_record_that_a_crash_cut_never_stops_a_start(tmp_path):
    """The machine rebooted in the middle of a line of the log, and every later start failed to read it."""
    save(tmp_path, {"w": torch.ones(1)})
    restore(tmp_path, {"w": torch.zeros(1)})
    cut = tmp_path / "generations/0002.json"
    cut.write_bytes(cut.read_bytes()[:30])
    (tmp_path / "generations/.tmp-1234abcd").write_bytes(b'{"form')
    weights = torch.zeros(1)
    restored = restore(tmp_path, {"w": weights})
    assert weights.item() == 1
    assert "generations/0002.json is cut or damaged" in str(restored)


def test_b149_the_same_script_starts_and_resumes(tmp_path):
    """A path that asked to resume failed on the first run, when there was nothing yet."""
    assert restore(tmp_path / "not/yet/there", {"w": torch.zeros(1)}) is None
