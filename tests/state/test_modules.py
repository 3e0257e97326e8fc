"""Modules: names without wrappers, ties, buffers of every sort, and refusals that touch nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from rebuild import keep, put, raw, same_bytes, weights
from unbroken.errors import StateMismatch, UnsupportedValue, UsageError
from unbroken.state.names import slots_of
from unbroken.state.registry import State


class Net(nn.Module):
    """With a submodule that is called as a wrapper's would be, and a buffer outside the state dict."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.module = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.module(x))


NAMES = {
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "cache",
}


@pytest.fixture(scope="module")
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_wrapping_leads_to_the_same_names(single_rank):
    compiled = torch.compile(Net(), backend="eager")
    for wrapped in (
        Net(),
        compiled,
        DistributedDataParallel(Net()),
        DistributedDataParallel(torch.compile(Net(), backend="eager")),
        torch.compile(DistributedDataParallel(Net()), backend="eager"),
        nn.DataParallel(Net()),
        checkpoint_wrapper(Net()),
    ):
        assert {slot.fqn for slot in slots_of("model", wrapped)} == NAMES


def test_a_wrapper_deep_inside_vanishes_too_and_an_average_does_not():
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)), torch.compile(nn.Linear(1, 1), backend="eager"))
    fqns = {slot.fqn for slot in slots_of("model", nn.ModuleDict({"a": inner}))}
    assert fqns == {"a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"}
    assert {slot.fqn for slot in slots_of("ema", AveragedModel(nn.Linear(1, 1)))} == {
        "module.weight",
        "module.bias",
        "n_averaged",
    }


def test_a_model_saved_in_one_wrapping_is_restored_in_another(single_rank):
    before, after = Net(), Net()
    put(keep({"model": torch.compile(before, backend="eager")}), {"model": DistributedDataParallel(after)})
    assert weights(before) == weights(after)


def test_a_child_that_holds_its_parent_is_no_endless_walk():
    parent, child = nn.Linear(1, 1), nn.Linear(1, 1)
    parent.child, child.parent = child, parent
    assert {slot.fqn for slot in slots_of("model", parent)} == {"weight", "bias", "child.weight", "child.bias"}


def test_a_model_comes_back_with_every_bit_in_its_own_storage():
    before, after = Net(), Net()
    with torch.no_grad():
        before.module.weight.view(torch.int32)[0, 0] = 0x7FC12345  # a NaN with a payload
        before.norm.running_mean[0] = -0.0
    places = {name: tensor.data_ptr() for name, tensor in after.state_dict().items()}
    assert put(keep({"model": before}), {"model": after}).warnings == []
    assert weights(before) == weights(after)
    assert places == {name: tensor.data_ptr() for name, tensor in after.state_dict().items()}
    assert after.module.weight.requires_grad and after.module.weight.is_leaf


def test_channels_last_stays():
    before, after = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    stride = after.weight.stride()
    put(keep({"model": before}), {"model": after})
    assert after.weight.stride() == stride and weights(before) == weights(after)


def test_only_parameters_under_ddp_of_all_ranks_are_replicated(single_rank):
    captured = State({"model": DistributedDataParallel(Net())}).capture(accumulating=False)
    assert not any(live.spread for live in captured.tensors.values())


def test_a_transient_buffer_may_be_missing_and_is_named():
    before, after = Net(), Net()
    del before._buffers["cache"]
    kept_cache = raw(after.cache)
    (warning,) = put(keep({"model": before}), {"model": after}).warnings
    assert "model/cache" in warning and raw(after.cache) == kept_cache
    (warning,) = put(keep({"model": Net()}), {"model": before}).warnings
    assert "cache" in warning


class Tied(nn.Module):
    """Embedding and head share one weight, as one parameter, as one storage, or not at all."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if tie == "object":
            self.head.weight = self.embedding.weight
        elif tie == "storage":
            self.head.weight = nn.Parameter(self.embedding.weight.detach())


@pytest.mark.parametrize("saved", ["object", "storage"])
@pytest.mark.parametrize("live", ["object", "storage", "none"])
def test_tied_weights_are_stored_once_and_fill_whatever_has_their_names(saved, live):
    before, after = Tied(saved), Tied(live)
    kept = keep({"model": before})
    assert [name for name in kept.tensors if name.startswith("model/")] == ["model/embedding.weight"]
    put(kept, {"model": after})
    assert same_bytes(after.embedding.weight, before.embedding.weight)
    assert same_bytes(after.head.weight, before.embedding.weight)
    assert (after.head.weight.data_ptr() == after.embedding.weight.data_ptr()) == (live != "none")


@pytest.mark.parametrize("live", ["object", "storage"])
def test_weights_that_were_separate_cannot_be_restored_into_tied_ones(live):
    after = Tied(live)
    untouched = weights(after)
    with pytest.raises(StateMismatch, match=r"model/embedding\.weight and model/head\.weight are one tensor"):
        put(keep({"model": Tied("none")}), {"model": after})
    assert weights(after) == untouched


def test_a_weight_that_two_registered_models_share_is_stored_once():
    def make():
        whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return {"model": whole, "head": whole[1]}

    before, after = make(), make()
    kept = keep(before)
    assert "head/weight" not in kept.tensors
    put(kept, after)
    assert weights(before["model"]) == weights(after["model"])
    apart = {"model": make()["model"], "head": nn.Linear(2, 2)}
    put(kept, apart)
    assert same_bytes(apart["head"].weight, before["head"].weight)


def test_a_tied_shape_that_changed_on_one_side_is_refused():
    after = Tied("none")
    after.head = nn.Linear(1, 4, bias=False)
    with pytest.raises(StateMismatch, match=r"model/embedding\.weight is float32 \[4, 1\], and was float32 \[4, 3\]"):
        put(keep({"model": Tied("object")}), {"model": after})


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.count = (0, {})

    def get_extra_state(self) -> object:
        return {"count": self.count, "tensor": torch.full((2,), float(self.count[0]))}

    def set_extra_state(self, state) -> None:
        self.count, self.tensor = state["count"], state["tensor"]


def test_extra_state_comes_back_with_its_types():
    before, after = nn.Sequential(Counting()), nn.Sequential(Counting())
    before[0].count = (7, {1: "x"})
    put(keep({"model": before}), {"model": after})
    assert after[0].count == (7, {1: "x"}) and after[0].tensor.tolist() == [7.0, 7.0]


def test_what_was_frozen_since_is_one_warning_with_number_and_names():
    before, after = Net(), Net()
    after.module.requires_grad_(False)
    (warning,) = put(keep({"model": before}), {"model": after}).warnings
    assert "frozen now: 2 (module.weight, module.bias)" in warning
    (warning,) = put(keep({"model": after}), {"model": before}).warnings
    assert "trained now: 2" in warning


def mismatches():
    wide = Net(4)
    halved = Net().bfloat16()
    without = Net()
    del without.norm
    more = Net()
    more.extra = nn.Linear(1, 1)
    yield wide, r"differ: 6 \(model/module\.weight is float32 \[4, 4\], and was float32 \[3, 3\]"
    yield halved, "is bfloat16"
    yield without, r"only in the checkpoint: 5 \(model/norm\.bias, .*…\)"
    yield more, r"missing in the checkpoint: 2 \(model/extra\.weight, model/extra\.bias\)"


@pytest.mark.parametrize(("after", "text"), [*mismatches()])
def test_what_does_not_fit_is_named_and_nothing_is_touched(after, text):
    untouched = weights(after)
    kept = keep({"model": Net()})
    rng = torch.get_rng_state()
    with pytest.raises(StateMismatch, match=text):
        put(kept, {"model": after})
    assert weights(after) == untouched and torch.equal(rng, torch.get_rng_state())


def test_without_strict_what_both_have_is_restored_and_the_rest_named():
    before, after = Net(), Net()
    del before.norm
    after.extra = nn.Linear(1, 1)
    warnings = put(keep({"model": before}), {"model": after}, strict=False).warnings
    assert any("missing in the checkpoint: 7 (model/norm.weight" in warning for warning in warnings)
    assert same_bytes(before.module.weight, after.module.weight)


def test_a_registered_name_that_is_gone_or_new_or_of_another_kind_is_named():
    model = nn.Linear(1, 1)
    kept = keep({"model": model, "average": nn.Linear(1, 1)})
    with pytest.raises(StateMismatch, match=r"only in the checkpoint: 1 \(average\)"):
        put(kept, {"model": model})
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: 1 \(other\)"):
        put(kept, {"model": model, "average": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    with pytest.raises(StateMismatch, match="average is registered as optimizer, and was as module"):
        put(kept, {"model": model, "average": torch.optim.SGD(model.parameters(), 0.1)})


def test_a_lazy_model_is_asked_for_one_batch_first():
    with pytest.raises(UsageError, match=r"model/weight has no shape yet: run one batch"):
        keep({"model": nn.LazyLinear(2)})


def test_a_tensor_without_plain_bytes_is_refused_by_name():
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedValue, match=r"model/table is a tensor of layout torch\.sparse_coo"):
        keep({"model": model})


def test_an_expanded_buffer_gets_its_values_without_writing_one_place_twice():
    def make(value):
        model = nn.Module()
        model.register_buffer("shared", torch.tensor([value]).expand(3))
        return model

    before, after = make(2.0), make(0.0)
    put(keep({"model": before}), {"model": after})
    assert after.shared.tolist() == [2.0] * 3 and after.shared.stride() == (0,)
    before.shared = torch.tensor([1.0, 2.0, 3.0])
    put(keep({"model": before}), {"model": after})
    assert after.shared.tolist() == [1.0, 2.0, 3.0]


def test_raw_tensors_and_parameters_are_restored_in_place():
    def make():
        return {"w": nn.Parameter(torch.rand(3)), "t": torch.rand(2).to(torch.float64)}

    before, after = make(), make()
    place = after["w"].data_ptr()
    put(keep(before), after)
    assert same_bytes(before["w"], after["w"]) and same_bytes(before["t"], after["t"])
    assert after["w"].data_ptr() == place
