"""Lightning Fabric: a job that was stopped and started again is the job that was not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

from integrations.fabric_jobs import BATCH, SAMPLES, Job, train

JOBS = "integrations.fabric_jobs"
PER_EPOCH = SAMPLES // BATCH


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[int, Any]:
    """What two starts told of each step; a step may be cut in two."""
    steps = dict(first["told"])
    for step, told in second["told"].items():
        steps[step] = [*steps.get(step, []), *told]
    return steps


def assert_goes_on(whole: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """The second start ends as if the first had not been stopped."""
    assert joined(first, second) == whole["told"]
    assert {**second, "told": None} == {**whole, "told": None}


ALONE = {
    "plain": Job(),
    "accumulating": Job(accumulate=3),
    "several optimizers": Job(optimizers=2),
    "workers": Job(workers=1),
    "bf16-mixed": Job(precision="bf16-mixed"),
    "bf16-true": Job(precision="bf16-true"),
    "a scaler": Job(precision="16-mixed", accumulate=2),
    "validation": Job(validate="before the step"),
    "compiled before": Job(compiled="before"),
    "compiled after": Job(compiled="after"),
    "a stream": Job(data="stream"),
    "a weighted sampler": Job(data="weighted"),
    "a sampler of one's own": Job(data="own sampler"),
    "a batch sampler": Job(data="batch sampler"),

}


@pytest.mark.parametrize("job", ALONE.values(), ids=list(ALONE))
def test_alone_a_job_goes_on_from_any_batch(tmp_path, job):
    steps = PER_EPOCH // job.accumulate + 4
    whole = train(0, 1, str(tmp_path / "whole"), job, steps)
    edge = PER_EPOCH // job.accumulate
    stops = [(1, 0), (edge - 1, job.accumulate - 1), (edge, 0), (edge + 1, 0)]
    if job.workers:
        stops = stops[1:3]
    for stop in stops:
        directory = str(tmp_path / "-".join(map(str, stop)))
        first = train(0, 1, directory, job, steps, stop)
        assert_goes_on(whole, first, train(0, 1, directory, job, steps))
