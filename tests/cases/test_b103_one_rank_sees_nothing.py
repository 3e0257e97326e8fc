"""B103: one rank got a checkpoint's path and the other None; collectives paired wrongly, and it crashed far away.

Right: all ranks agree before any other collective, and the error says who differs, within seconds.
"""

from __future__ import annotations

from cases.test_b100_not_one_directory import refused, written  # noqa: F401  # `written` is a fixture


def test_b103_one_rank_sees_nothing(ranks, written, tmp_path):  # noqa: F811
    (tmp_path / "empty").mkdir()
    text = refused(ranks, [written, tmp_path / "empty"], tmp_path)
    assert "rank 1" in text
    assert f"uses {tmp_path}/empty, which holds no checkpoint" in text
    assert "which holds checkpoints up to step 4" in text


def test_b103_the_other_way_round_nothing_starts_anew(ranks, written, tmp_path):  # noqa: F811
    (tmp_path / "empty").mkdir()
    text = refused(ranks, [tmp_path / "empty", written], tmp_path)
    assert "rank 1 on " in text
    assert "up to step 4" in text
    assert not list((tmp_path / "empty").glob("generations/*.json"))
