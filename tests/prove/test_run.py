"""The whole proof, on a script that plays a training job: it must pass what is right and find what is wrong."""

import os
from pathlib import Path

import pytest

from unbroken.errors import UsageError
from unbroken.prove.launch import Command
from unbroken.prove.run import Settings, prove

FAKE = str(Path(__file__).with_name("fake_training.py"))
STEPS, EVERY = 24, 4


def run(directory, *arguments, kinds=("rank",), nodes=1, nproc=2, trials=1, deadline_s=60.0, seed=0, tell=None):
    command = Command((FAKE, "--steps", str(STEPS), "--every", str(EVERY), *arguments), nproc)
    settings = Settings(command, nodes, kinds, trials, seed, directory, deadline_s, grace_s=1.0)
    return prove(settings, tell or (lambda _: None))


def still_running(directory):
    """Processes whose environment names the proof's directory, found without the module under test."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(directory).encode() in (entry / "environ").read_bytes():
                    found.append(entry.name)
            except OSError:
                continue
    return found


def test_a_script_that_resumes_exactly_passes_every_kind_of_fault(tmp_path):
    report = run(tmp_path, kinds=("rank", "node", "all"), nodes=2, nproc=1, trials=3)
    assert report.passed, [trial.difference or trial.problem for trial in report.trials]
    assert report.compared == ("samples", "rng", "loss", "model", "optimizer", "final")
    assert report.reference.steps == STEPS
    assert {trial.strikes[0].fault.kind for trial in report.trials} == {"rank", "node", "all"}
    assert all(trial.strikes[0].restored is not None for trial in report.trials)
    assert still_running(tmp_path) == []


def test_a_job_that_starts_its_lost_workers_again_by_itself_is_struck_and_not_started_anew(tmp_path):
    launcher = str(Path(__file__).with_name("fake_launcher.py"))
    command = Command((launcher, "2", "--steps", str(STEPS), "--every", str(EVERY)), 2, "none")
    report = prove(Settings(command, 1, ("rank",), 3, 0, tmp_path, 60.0, grace_s=1.0))
    assert report.passed, [trial.difference or trial.problem for trial in report.trials]
    strikes = [strike for trial in report.trials for strike in trial.strikes]
    assert len(strikes) > 3  # more than one in some start
    assert all(strike.steps_lost is not None and strike.steps_lost < 3 * EVERY for strike in strikes)
    assert [len(trial.place.logs()) for trial in report.trials] == [1, 1, 1]
    assert still_running(tmp_path) == []


def test_a_job_that_does_not_start_its_lost_workers_again_is_started_anew(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        f"import os, runpy; os.environ.update(RANK='0', WORLD_SIZE='1'); runpy.run_path({FAKE!r}, run_name='__main__')"
    )
    command = Command((str(script), "--steps", str(STEPS), "--every", str(EVERY)), 1, "none")
    report = prove(Settings(command, 1, ("rank",), 1, 0, tmp_path / "proof", 60.0, grace_s=1.0))
    assert report.passed, [trial.difference or trial.problem for trial in report.trials]
    trial = report.trials[0]
    assert len(trial.place.logs()) == len(trial.strikes) + 1


@pytest.mark.slow  # its short twins, within processes, are in test_forgetful.py
@pytest.mark.parametrize("forgotten", ["samples", "rng", "optimizer"])
def test_a_script_that_forgets_a_part_of_its_state_fails_and_the_part_is_named(tmp_path, forgotten):
    report = run(tmp_path, "--forget", forgotten)
    trial = report.trials[-1]
    assert not report.passed
    strike = trial.strikes[0]
    assert strike.restored is not None and 0 < strike.restored < STEPS
    assert trial.difference.step == strike.restored + 1
    assert forgotten in (*trial.difference.parts, *trial.difference.later)
    assert not trial.difference.before_fault
    assert still_running(tmp_path) == []


@pytest.mark.slow  # its short twin is in test_forgetful.py
def test_a_script_that_does_not_repeat_itself_is_not_blamed_on_resuming(tmp_path):
    report = run(tmp_path, "--drift", nproc=1)
    assert not report.passed
    assert report.trials[0].nondeterministic
    assert (tmp_path / "undisturbed-again").is_dir() or report.trials[0].difference.before_fault


def test_a_script_that_repeats_itself_and_differs_after_a_fault_is_blamed(tmp_path):
    report = run(tmp_path, "--forget", "rng", nproc=1)
    assert not report.trials[0].nondeterministic
    assert (tmp_path / "undisturbed-again").is_dir()


@pytest.mark.parametrize("kind", ["save", "restore", "disk-full"])
def test_faults_inside_a_checkpointer_are_wrong_use_where_there_is_none(tmp_path, kind):
    with pytest.raises(UsageError, match=f"--faults {kind}: they strike inside"):
        run(tmp_path, kinds=("rank", kind), nproc=1)


def test_a_script_without_a_checkpointer_meets_the_faults_that_it_can_meet(tmp_path):
    report = run(tmp_path, kinds=(), nproc=1)
    assert report.passed
    assert list(report.kinds) == ["rank", "node", "all", "sigterm"]


@pytest.mark.parametrize("kind", ["bit-flip", "truncate"])
def test_damage_that_a_script_does_not_notice_is_found(tmp_path, kind):
    """It reads the file that was written last, whatever became of it."""
    report = run(tmp_path, kinds=(kind,), nproc=1)
    (strike,) = report.trials[0].strikes
    assert strike.how.startswith("bit ") or " cut to " in strike.how
    assert not report.passed


def test_a_job_that_hangs_after_a_fault_fails_and_nothing_stays_behind(tmp_path):
    report = run(tmp_path, "--hang", deadline_s=15.0)
    assert "the job hangs: start 2 did not end within 15 s" in report.trials[0].problem
    assert still_running(tmp_path) == []


def test_a_job_that_cannot_go_on_fails_with_its_last_lines(tmp_path):
    report = run(tmp_path, "--fail")
    assert report.trials[0].problem == "the job fails when it is started again (start 2, exit code 1)"
    assert report.trials[0].output.endswith("RuntimeError: cannot go on from here")


def test_a_script_without_a_ledger_is_judged_by_its_final_weights(tmp_path):
    report = run(tmp_path, "--no-ledger")
    assert report.passed
    assert report.compared == ("final",)
    assert report.trials[0].strikes


def test_a_script_that_fails_undisturbed_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match=r"(?s)fails undisturbed \(exit code 1\).*RuntimeError: broken from the start"):
        run(tmp_path, "--broken", nproc=1)
    assert still_running(tmp_path) == []


def test_a_script_that_leaves_nothing_to_compare_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="nothing to compare"):
        run(tmp_path, "--no-ledger", "--silent")


def test_an_interrupted_proof_leaves_no_process(tmp_path):
    def interrupt(line):
        if line.startswith("undisturbed run took"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tell=interrupt)
    assert still_running(tmp_path) == []


def test_a_directory_that_holds_something_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
