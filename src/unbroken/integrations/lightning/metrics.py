"""What was logged, and what metrics have gathered so far: each rank's own, which Lightning forgets.

An epoch's mean is made of all its batches, those before a restore too; callbacks and schedulers read the newest
values; and a `torchmetrics.Metric` keeps what it gathers in plain attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric, MetricCollection

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META_TOO = ("dataloader_idx", "metric_attribute")
_SHOWN = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
"""Of Lightning's logger connector."""


class Metrics:
    """Results and metrics of a Trainer. Registered with the Checkpointer; `apply` puts back what was loaded."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        if self._loaded is not None:
            return dict(self._loaded)
        connector, results = self._trainer._logger_connector, self._trainer.fit_loop.epoch_loop._results
        return {
            "results": [(key, _describe(result)) for key, result in results.items()],
            "shown": {name: _copied(getattr(connector, name)) for name in _SHOWN},
            "metrics": {name: _gathered(metric) for name, metric in self._metrics()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state, until the Trainer is ready for it."""
        self._loaded = state

    def apply(self) -> None:
        """Put back what was loaded."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        results = self._trainer.fit_loop.epoch_loop._results
        results.clear()
        for key, described in loaded["results"]:
            results[key] = self._rebuilt(described)
        for name, value in loaded["shown"].items():
            setattr(self._trainer._logger_connector, name, value)
        for name, metric in self._metrics():
            _put_back(metric, loaded["metrics"].get(name))

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        modules = list(self._trainer.lightning_module.named_modules())
        for _, module in modules:
            if isinstance(module, MetricCollection):
                list(module.values(copy_state=False))  # metrics of one group get what their first one gathered
        return ((name, module) for name, module in modules if isinstance(module, Metric))

    def _rebuilt(self, described: Mapping[str, Any]) -> _ResultMetric:
        told = described["meta"]
        meta = _Metadata(reduce_fx=told["reduce"], **{name: told[name] for name in (*_META, *_META_TOO)})
        reduce = self._trainer.strategy.reduce
        meta.sync = _Sync(fn=reduce, _should=told["sync"], rank_zero_only=told["rank_zero_only"])
        result = _ResultMetric(meta, described["is_tensor"])
        result.to(self._trainer.strategy.root_device)
        if described["is_tensor"]:
            _put_back(result, described["gathered"])
        else:
            metric = self._trainer.lightning_module.get_submodule(told["metric_attribute"])
            result.value = metric
            result._update_count = described["gathered"]["count"]
        result._forward_cache = described["newest"]
        result.has_reset = described["has_reset"]
        return result


def _describe(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    told = {name: getattr(meta, name) for name in (*_META, *_META_TOO)}
    told |= {
        "reduce": meta.reduce_fx.__name__,
        "sync": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
    }
    gathered = _gathered(result) if result.is_tensor else {"count": result._update_count}
    return {
        "meta": told,
        "is_tensor": result.is_tensor,
        "gathered": gathered,
        "newest": _copied(result._forward_cache),
        "has_reset": result.has_reset,
    }


def _gathered(metric: Metric) -> dict[str, Any]:
    return {
        "count": metric._update_count,
        "states": {name: _copied(getattr(metric, name)) for name in metric._defaults},
    }


def _put_back(metric: Metric, gathered: Mapping[str, Any] | None) -> None:
    if gathered is None:
        return
    for name, value in gathered["states"].items():
        setattr(metric, name, _on_device(value, metric))
    metric._update_count = gathered["count"]
    metric._computed = None


def _on_device(value: Any, metric: Metric) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(metric.device)
    return [_on_device(item, metric) for item in value] if isinstance(value, list) else value


def _copied(value: Any) -> Any:
    """The value, its containers copied and its tensors off the graph: metrics add to theirs in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
