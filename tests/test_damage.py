"""What lies damaged in a run directory costs its own steps, never the run."""

import pytest

import unbroken
from toy import make_job, run_to, train
from unbroken import generations
from unbroken.errors import (
    HistoryExists,
    NoUsableCheckpoint,
    SaveFailed,
)
from unbroken.store.local import LocalStore


def damage(path, size=None, byte=None):
    data = bytearray(path.read_bytes())
    if byte is not None:
        data[byte] ^= 0x10
    path.write_bytes(data[:size])


@pytest.mark.parametrize(
    "what", ["cut", "empty", "missing", "bit flip", "manifest cut", "manifest empty", "manifest missing"]
)
def test_a_damaged_newest_checkpoint_costs_its_own_steps_only(tmp_path, what, caplog):
    run_to(tmp_path, 5)
    manifest, file = tmp_path / "step-5/manifest.json", tmp_path / "step-5/g0001-rank-00000.safetensors"
    {
        "cut": lambda: damage(file, size=-1),
        "empty": lambda: damage(file, size=0),
        "missing": file.unlink,
        "bit flip": lambda: damage(file, byte=-20),
        "manifest cut": lambda: damage(manifest, size=200),
        "manifest empty": lambda: damage(manifest, size=0),
        "manifest missing": manifest.unlink,
    }[what]()
    job = make_job(tmp_path, 0, 1)
    restored = job.ckpt.restore()
    assert restored.step == 4
    if what == "manifest missing":
        assert restored.skipped == (), "it was never committed"
    else:
        assert len(restored.skipped) == 1
        assert "step-5" in str(restored)
        assert "step-5" in caplog.text
    job.ckpt.close()


def test_when_nothing_is_whole_the_error_lists_each_and_nothing_starts_anew(tmp_path):
    run_to(tmp_path, 2)
    for step in (1, 2):
        damage(tmp_path / f"step-{step}/g0001-rank-00000.safetensors", byte=-20)
    job = make_job(tmp_path, 0, 1)
    with pytest.raises(NoUsableCheckpoint, match=r"step-2 cannot be used.*bytes.*step-1 cannot be used.*new directory"):
        job.ckpt.restore()
    assert not (tmp_path / "generations/0002.json").exists()


@pytest.mark.parametrize("lost", ["cut", "deleted", "all deleted"])
def test_a_lost_generation_record_costs_no_step_and_its_number_is_not_given_out_again(tmp_path, lost):
    """Checkpoints of a generation without its record were passed over; a new start took the number a second time."""
    run_to(tmp_path, 3)
    for until in (6, 9):
        job = make_job(tmp_path, 0, 1, seed=until, every=unbroken.Every(steps=1), keep=unbroken.Keep(last=2))
        job.ckpt.restore()
        train(job, until).ckpt.close()
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-8", "step-9"}, "all of generation 3"
    for record in sorted((tmp_path / "generations").glob("*.json"))[0 if lost == "all deleted" else -1 :]:
        record.write_bytes(record.read_bytes()[:50]) if lost == "cut" else record.unlink()
    job = make_job(tmp_path, 0, 1, seed=4, every=unbroken.Every(steps=1))
    restored = job.ckpt.restore()
    assert (restored.step, restored.generation) == (9, 3)
    assert "tells the lineage instead" in str(restored)
    train(job, 11).ckpt.close()
    assert list(tmp_path.glob("step-11/g0004-rank-00000.safetensors")), "the next number after all that were used"
    assert make_job(tmp_path, 0, 1).ckpt.restore().step == 11


def test_checkpoints_that_no_history_reaches_are_no_fresh_start(tmp_path):
    run_to(tmp_path, 3)
    generations.begin(LocalStore(tmp_path), None, 1)
    (tmp_path / "generations/0001.json").unlink()
    with pytest.raises(NoUsableCheckpoint, match="step-3 and what is older belong to an abandoned history"):
        make_job(tmp_path, 0, 1).ckpt.restore()
    with pytest.raises(HistoryExists, match="up to step 3"):
        make_job(tmp_path, 0, 1).ckpt.save()


def test_what_is_planted_in_the_way_of_a_save_costs_the_save_only(tmp_path):
    """A link where the step's directory should be raised ValueError in the writer, and no vote was cast."""
    job = make_job(tmp_path / "run", 0, 1, every=unbroken.Every(steps=1))
    job.ckpt.restore()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere")
    train(job, 1)
    with pytest.raises(SaveFailed, match="links inside a run directory are refused"):
        job.ckpt.wait()
    train(job, 2).ckpt.close()
    assert (tmp_path / "run/step-2/manifest.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
