"""B112: a checkpoint of ZeRO did not load with another number of data-parallel ranks.

B087: nor did one without `latest`. There is no file here that names the latest: what is newest and
whole is found.
"""

import pytest

pytest.importorskip("deepspeed")

from integrations.deepspeed_jobs import Job
from integrations.test_deepspeed import assert_same_in
from processes import Ranks


@pytest.fixture(scope="module")
def ranks():
    """Processes of its own: engines are never collected."""
    processes = Ranks(2)
    yield processes
    processes.stop()


@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_of_zero_go_on_as_one(ranks, tmp_path, stage):
    assert_same_in(ranks, str(tmp_path), (2, stage), [(1, stage)], bf16=True)
    job = Job(stage, bf16=True, groups=2)
    (alone,) = ranks.run_all_well("integrations.deepspeed_jobs:train", 1, str(tmp_path), job, 4)
    assert set(alone["told"]) == {3, 4}
