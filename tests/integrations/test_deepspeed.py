"""DeepSpeed engines of every stage: a job that was stopped and started again is the job that was not."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)

from integrations.deepspeed_jobs import Job
from processes import Ranks

JOBS = "integrations.deepspeed_jobs"
STEPS = 7
EACH = {
    "stage 0": Job(0, accumulate=2),
    "stage 1": Job(1, accumulate=2),
    "stage 2": Job(2, accumulate=2),
    "stage 3": Job(3, accumulate=2),
    "stage 0, bf16": Job(0, bf16=True, accumulate=2),
    "stage 1, bf16": Job(1, bf16=True, accumulate=2),
    "stage 1, bf16, summed wide": Job(1, bf16=True, accumulate=2, wide_sums=True),
    "stage 2, bf16": Job(2, bf16=True, accumulate=2),
    "stage 2, bf16, summed wide": Job(2, bf16=True, accumulate=2, wide_sums=True),
    "stage 3, bf16": Job(3, bf16=True, accumulate=2),
    "stage 2, groups, frozen": Job(2, bf16=True, groups=3, frozen=True),
    "stage 3, groups, frozen": Job(3, bf16=True, groups=2, frozen=True, sub_group=20, keep_gathered=30),
    "stage 1, offloaded": Job(1, bf16=True, offload=True),
    "stage 2, offloaded": Job(2, offload=True),
    "stage 3, offloaded": Job(3, bf16=True, offload=True),
}


@pytest.fixture(scope="module")
def ranks():
    """Processes of its own: engines are never collected, and each search of later tests would go through them."""
    processes = Ranks(4)
    yield processes
    processes.stop()


def assert_goes_on(whole: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """The second start ends as if the first had not been stopped."""
    steps = dict(first["told"])
    for step, told in second["told"].items():
        steps[step] = [*steps.get(step, []), *told]
    assert steps == whole["told"]
    assert {**second, "told": None} == {**whole, "told": None}


@pytest.mark.parametrize("job", EACH.values(), ids=list(EACH))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_goes_on_from_any_step(ranks, tmp_path, world_size, job):
    def start(name: str, *more: Any) -> list[Any]:
        return ranks.run_all_well(f"{JOBS}:train", world_size, str(tmp_path / name), job, *more)

    whole = start("whole", STEPS)
    stops = [(3, 0)] if job.offload or job.accumulate == 1 else [(3, 1)]
    for stop in stops:
        first = start(f"{stop}", STEPS, stop)
        for each in zip(whole, first, start(f"{stop}", STEPS), strict=True):
            assert_goes_on(*each)


@pytest.mark.parametrize("job", [Job(2, bf16=True), Job(3)], ids=["ZeRO-2", "ZeRO-3"])
def test_on_four_ranks_a_job_goes_on(ranks, tmp_path, job):
    def start(name: str, *more: Any) -> list[Any]:
        return ranks.run_all_well(f"{JOBS}:train", 4, str(tmp_path / name), job, *more)

    whole, first = start("whole", 6), start("run", 6, (3, 0))
    for each in zip(whole, first, start("run", 6), strict=True):
        assert_goes_on(*each)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_goes_and_comes_back_in_the_middle_of_an_epoch(ranks, tmp_path, stage):
    """Under another stage each time; the global batch stays 8."""
    whole = samples_by_step(ranks.run_all_well(f"{JOBS}:train", 2, str(tmp_path / "whole"), Job(stage), 8))
    seen: dict[int, list[int]] = {}
    for at, (world_size, until) in enumerate([(2, 3), (1, 5), (2, 8)]):
        job = Job((stage + at) % 4)
        seen |= samples_by_step(ranks.run_all_well(f"{JOBS}:train", world_size, str(tmp_path / "run"), job, until))
    assert seen == whole
    assert sorted(sample for samples in seen.values() for sample in samples) == list(range(64)), "each sample once"


def samples_by_step(told: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Over all ranks."""
    steps = told[0]["told"]
    return {step: sorted(i for rank in told for _, ids in rank["told"][step] for i in ids) for step in steps}


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (Job(2, loader_of_its_own=True), "training_data"),
        (Job(2, unmanaged=True), "managed_gradient_accumulation"),
    ],
    ids=["its own loader", "unmanaged windows"],
)
def test_what_makes_an_exact_resume_impossible_is_named_at_the_start(ranks, tmp_path, job, named):
    (raised,) = ranks.run(f"{JOBS}:train", 1, str(tmp_path), job, 2)
    assert raised.kind == "UsageError" and named in raised.text


def test_a_window_of_another_layout_is_refused(ranks, tmp_path):
    ranks.run_all_well(f"{JOBS}:train", 2, str(tmp_path), Job(2, accumulate=2), 4, (2, 1))
    (raised,) = ranks.run(f"{JOBS}:train", 1, str(tmp_path), Job(2, accumulate=2), 4)
    assert "inside an accumulation window of DeepSpeedZeroOptimizer on 2 ranks" in raised.text


def test_a_changed_deepspeed_is_refused_by_name():
    from unbroken.errors import UsageError
    from unbroken.integrations.deepspeed.private import OF_AN_ENGINE, check

    with pytest.raises(UsageError, match=r"object\.optimizer is not as unbroken knows it from deepspeed 0\.19\.8"):
        check(object(), OF_AN_ENGINE)


def gathered(told: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Tensors put together from the pieces of all ranks; replicas must be alike."""
    whole: dict[str, dict[Any, list[float]]] = {}
    for rank in told:
        for name, pieces in rank["pieces"].items():
            for box, values in pieces:
                assert whole.setdefault(name, {}).setdefault(box, values) == values, name
    return {name: _in_order(pieces) for name, pieces in whole.items()}


def _in_order(pieces: dict[Any, list[float]]) -> list[float]:
    if None in pieces:
        return pieces[None]
    shape = next(iter(pieces))[2]
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * shape[at + 1]
    values: dict[int, float] = {}
    for (begin, end, _), held in pieces.items():
        indices = itertools.product(*(range(low, high) for low, high in zip(begin, end, strict=True)))
        for index, value in zip(indices, held, strict=True):
            values[sum(at * stride for at, stride in zip(index, strides, strict=True))] = value
    return [values[at] for at in range(len(values))]


LAYOUTS = [(world_size, stage) for stage in range(4) for world_size in (1, 2, 4)]
SOME = [(2, 2), (4, 3), (1, 0), (2, 1)]


def assert_same_in(
    ranks: Any, directory: str, saved: tuple[int, int], layouts: list[tuple[int, int]], bf16: bool
) -> None:
    """Masters and moments that one layout saved are, to the bit, what others and plain PyTorch restore."""
    world_size, stage = saved
    job = Job(stage, bf16=bf16, groups=2)
    ranks.run_all_well(f"{JOBS}:train", world_size, directory, job, 2, (2, 0))
    own = ranks.run_all_well(f"{JOBS}:masters_after", world_size, directory, job)
    tensors = gathered(own)
    assert len(tensors) == 7 + 1 + 3 * 7, "parameters, a buffer; two moments and a counter each"
    assert gathered(ranks.run_all_well(f"{JOBS}:plainly", 1, directory, job)) == tensors
    for others, other in layouts:
        told = ranks.run_all_well(f"{JOBS}:masters_after", others, directory, Job(other, bf16=bf16, groups=2))
        assert gathered(told) == tensors, f"{other} on {others}"
        assert all(rank["weights"] == own[0]["weights"] for rank in told), f"{other} on {others}"


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("saved", SOME[:2], ids=["2 x ZeRO-2", "4 x ZeRO-3"])
def test_masters_and_moments_are_the_same_in_another_layout(ranks, tmp_path, saved, bf16):
    assert_same_in(ranks, str(tmp_path), saved, [layout for layout in SOME if layout != saved], bf16)


@pytest.mark.slow  # its short twin is above
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("saved", LAYOUTS, ids=[f"{ranks} x ZeRO-{stage}" for ranks, stage in LAYOUTS])
def test_masters_and_moments_are_the_same_in_every_layout(ranks, tmp_path, saved, bf16):
    assert_same_in(ranks, str(tmp_path), saved, LAYOUTS, bf16)
