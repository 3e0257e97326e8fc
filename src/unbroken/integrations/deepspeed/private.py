"""The private names of DeepSpeed that the integration leans on, all of them.

Known to hold for deepspeed 0.19; `check` looks for each, so that another version is refused with a clear message
instead of going wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.integrations.known import check_attributes

AT_LEAST = "0.19"
TESTED = "0.19.8"

OF_AN_ENGINE = (
    "optimizer",
    "module",
    "lr_scheduler",
    "training_dataloader",
    "global_steps",
    "global_samples",
    "skipped_steps",
    "micro_steps",
    "_global_grad_norm",
    "has_moe_layers",
    "mpu",
    "seq_data_parallel_group",
)
MASTERS = {
    "FP16_UnfusedOptimizer": ("optimizer", "fp16_groups", "fp32_groups"),
    "BF16_Optimizer": (
        "optimizer",
        "bf16_groups",
        "bf16_partitioned_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_gradients_flat",
        "fp32_groups_has_gradients",
        "real_dp_process_group",
        "update_lp_params",
    ),
    "DeepSpeedZeroOptimizer": (
        "optimizer",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "round_robin_bit16_meta",
        "partition_size",
        "partition_gradients",
        "single_partition_of_fp32_groups",
        "real_dp_process_group",
        "averaged_gradients",
        "all_grad_tensors",
        "use_grad_accum_attribute",
        "micro_step_id",
        "cpu_offload",
        "update_lp_params",
        "_get_compact_grad_partition_buffer",
        "_use_compact_grad_partition_buffer",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        "optimizer",
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "sub_group_to_group_id",
        "sub_group_process_groups",
        "persistent_parameters",
        "micro_step_id",
        "offload_optimizer",
        "swap_optimizer",
        "_epilogue_ran_this_backward",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "invalidate_secondary_tensor",
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
    ),
}
"""Attributes by the class of `engine.optimizer`. The last of ZeRO-3 is what partial gradients lie in."""
GRADIENT_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
OF_A_PARTITIONED_PARAMETER = ("ds_tensor", "ds_shape", "ds_id")


def check(found: Any, attributes: Sequence[str]) -> None:
    """Raise UsageError, naming the attribute, if an object of the framework lacks one."""
    check_attributes(found, attributes, "deepspeed", TESTED)
