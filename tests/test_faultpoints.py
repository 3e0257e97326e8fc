"""A fault strikes once, at its point, from its step on, and nowhere else."""

import errno

import pytest

from unbroken import faultpoints
from unbroken.errors import UsageError


@pytest.fixture
def armed(monkeypatch, tmp_path):
    """Arm a fault that can be seen and survived."""

    def arm(point, from_step=0, rank=0):
        fault = faultpoints.Fault(point, rank, str(tmp_path / "told"), from_step, "no space")
        monkeypatch.setattr(faultpoints, "armed", fault)
        monkeypatch.setattr(faultpoints, "_saving_step", -1)
        return tmp_path / "told"

    return arm


def test_nothing_strikes_where_nothing_was_asked_for():
    assert faultpoints.armed is None
    for point in (*faultpoints.SAVE, *faultpoints.COMMIT, *faultpoints.RESTORE, *faultpoints.BEGIN):
        faultpoints.reach(point)


def test_a_fault_strikes_at_its_point_only_and_once(armed):
    told = armed("written")
    faultpoints.saving(1)
    faultpoints.reach("voted")
    assert not told.exists()
    with pytest.raises(OSError) as struck:
        faultpoints.reach("written")
    assert struck.value.errno == errno.ENOSPC
    assert told.exists()
    faultpoints.reach("written")


def test_a_fault_of_a_save_waits_for_its_step(armed):
    told = armed("written", from_step=7)
    for step in (5, 6):
        faultpoints.saving(step)
        faultpoints.reach("written")
    assert not told.exists()
    faultpoints.saving(8)
    with pytest.raises(OSError):
        faultpoints.reach("written")


def test_a_fault_of_a_restore_does_not_wait_for_a_step(armed):
    armed("reading", from_step=7)
    with pytest.raises(OSError):
        faultpoints.reach("reading")


def test_only_the_rank_that_was_chosen_is_struck(armed, monkeypatch):
    armed("reading", rank=1)
    faultpoints.reach("reading")
    monkeypatch.setenv("RANK", "1")  # after the module was imported: some launchers tell a rank late
    with pytest.raises(OSError):
        faultpoints.reach("reading")


def test_a_variable_that_nobody_of_ours_has_set_is_told(monkeypatch):
    monkeypatch.setenv(faultpoints.VARIABLE, "yes")
    with pytest.raises(UsageError, match="unset it"):
        faultpoints._asked_for()
