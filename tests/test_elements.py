"""The bytes of tensors, however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unbroken
from unbroken.elements import as_bytes
from unbroken.state.registry import State

ONE_OF_A_COLUMN = [
    torch.arange(8.0)[::2][1:2],
    torch.arange(8.0)[::2][:0],
    torch.arange(8.0).view(1, 8)[:, 3],
]
"""One element or none, with a stride of another length: contiguous, as torch counts."""
OTHERS = [
    torch.tensor(3.0),
    torch.arange(8.0).view(2, 4).t(),
    torch.arange(8.0).view(2, 4)[:, ::4],
    torch.complex(torch.arange(4.0), torch.arange(4.0)).conj(),
    torch.complex(torch.arange(4.0), torch.arange(4.0)).conj().imag,
    torch.empty(0, 3),
]


@pytest.mark.parametrize("tensor", [*ONE_OF_A_COLUMN, *OTHERS])
def test_they_are_the_elements_row_by_row(tensor):
    expected = tensor.resolve_conj().resolve_neg().numpy().tobytes()
    assert as_bytes(tensor).numpy().tobytes() == expected


def test_the_tensors_own_memory_is_looked_at_where_it_can_be():
    tensor = torch.arange(8.0)[::2][1:2]
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()


class Strided(nn.Module):
    """Parameters and buffers of one element, of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.arange(8.0)[::2][1:2])
        self.frozen = nn.Parameter(torch.arange(8.0).view(1, 8)[:, 3], requires_grad=False)
        self.register_buffer("counted", torch.arange(8.0)[::2][2:3])


@pytest.mark.parametrize("snapshot", ["overlap", "block"])
def test_one_element_of_a_column_is_saved_and_restored_like_any_other(tmp_path, snapshot):
    module = Strided()
    optimizer = torch.optim.AdamW(module.parameters())
    state = {"module": module, "optimizer": optimizer}
    with unbroken.Checkpointer(tmp_path, state, snapshot=snapshot, on_error="raise") as checkpointer:
        for _ in range(3):
            optimizer.zero_grad()
            module.trained.sum().backward()
            optimizer.step()
            module.counted.add_(1)
            checkpointer.step()
            checkpointer.save()
        expected = State(state).digests()
    fresh = Strided()
    state = {"module": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    with unbroken.Checkpointer(tmp_path, state) as checkpointer:
        assert checkpointer.restore().step == 3
    assert State(state).digests() == expected
