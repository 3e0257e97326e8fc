"""What a place tells of the runs in it. Starting a job is tried in test_run.py, with everything around it."""

import pytest

from unbroken.prove.launch import Job, Place


def log(place, start, node, text):
    path = place.root / f"start-{start:03d}" / f"node-{node}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_final_digest_comes_from_the_file(tmp_path):
    place = Place(tmp_path)
    log(place, 1, 0, "final aaaa\n")
    place.run.mkdir()
    (place.run / "final.txt").write_text("final bbbb\n")
    assert place.final() == "bbbb"


def test_the_final_digest_comes_from_the_newest_output_without_a_file(tmp_path):
    place = Place(tmp_path)
    log(place, 1, 0, "final aaaa\n")
    log(place, 2, 0, "restored step 4\nfinal bbbb\n")
    log(place, 2, 1, "nothing\n")
    assert place.final() == "bbbb"


@pytest.mark.parametrize("text", ["", "the final aaaa\n", "final words\n", "final\n"])
def test_only_a_line_of_its_own_is_a_final_digest(tmp_path, text):
    log(Place(tmp_path), 1, 0, text)
    assert Place(tmp_path).final() is None


def test_a_job_tells_what_it_restored_and_whether_it_was_preempted(tmp_path):
    place = Place(tmp_path)
    preempted = "  traceback : …\n  exitcode  : 75 (pid: 4321)\n"
    logs = [log(place, 1, 0, "restored step 40 from runs/gpt/step-40\n"), log(place, 1, 1, preempted)]
    assert Job([], logs, "m").restored_step() == 40
    assert Job([], logs, "m").preempted()
    logs = [log(place, 2, 0, "  exitcode  : 1 (pid: 75)\n")]
    assert Job([], logs, "m").restored_step() is None
    assert not Job([], logs, "m").preempted()


def test_the_last_lines_are_the_scripts_own_of_the_node_that_failed(tmp_path):
    place = Place(tmp_path)
    log(place, 1, 0, "ValueError: of an earlier start\n")
    log(place, 2, 0, "step 1\nstep 2\n")
    account = (
        "E1201 06:07:09.1 1 torch/distributed/elastic/api.py:984] failed (exitcode: 1) local_rank: 0\nRoot Cause\n"
    )
    log(place, 2, 1, f"W1201 06:07:01.1 1 torch/distributed/run.py:93] hello\nValueError: no such thing\n{account}")
    assert place.last_lines().endswith("hello\nValueError: no such thing")
    assert Place(tmp_path / "nothing").last_lines() == ""
