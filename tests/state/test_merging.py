"""What ranks had of one model in their values, as one."""

from unbroken.state.merging import merge


def test_gradients_of_stages_keep_the_placements_of_each():
    placed = {name: {"mesh": [2], "parameter": ["R"], "own": [own]} for name, own in (("a", "P(sum)"), ("b", "S(0)"))}
    stages = [
        {"kind": "gradients", "accumulating": True, "present": [name], "placements": {name: placed[name]}}
        for name in "ab"
    ]
    stages.append({"kind": "gradients", "accumulating": True, "present": ["c"]})
    merged = merge(stages)
    assert merged["placements"] == placed
    assert merged["present"] == ["a", "b", "c"]
