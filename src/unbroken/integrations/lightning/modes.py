"""Which parameters are frozen and which modules are in evaluation mode, where a script changed it under way.

Scripts do that in `on_train_epoch_start`, and Lightning does not call it where an epoch goes on in its middle.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class Modes:
    """Those of one module, beside what it began with in this process."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._began = self._now()

    def _now(self) -> dict[str, dict[str, bool]]:
        return {
            "training": {name: part.training for name, part in self._module.named_modules()},
            "requires_grad": {name: one.requires_grad for name, one in self._module.named_parameters()},
        }

    def changed(self) -> dict[str, dict[str, bool]]:
        """What is other than it was, by name."""
        now = self._now()
        return {
            kind: {name: is_so for name, is_so in now[kind].items() if began.get(name) is not is_so}
            for kind, began in self._began.items()
        }

    def put(self, changed: Mapping[str, Mapping[str, bool]]) -> None:
        """Make it so again. Names that are there no more are passed over: the restore has told of them."""
        parts, parameters = dict(self._module.named_modules()), dict(self._module.named_parameters())
        for name in changed["training"].keys() & parts.keys():
            parts[name].training = changed["training"][name]
        for name in changed["requires_grad"].keys() & parameters.keys():
            parameters[name].requires_grad_(changed["requires_grad"][name])
