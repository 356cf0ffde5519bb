"""Lets verl's fused kernels run under FSDP2 with models whose embeddings are not tied.

The fused forward reads `lm_head.weight` and never calls `lm_head`. verl makes `lm_head` an FSDP2
unit of its own. The weight of a unit is gathered only when the unit is called, so that the first
pass stops with "mixed torch.Tensor and DTensor". Here `lm_head` stays in the unit of the whole
model. A run without `actor_rollout_ref.model.use_fused_kernels` is left as it is.

Relies on verl 0.9: `verl.utils.fsdp_utils._select_fsdp2_wrap_targets(model, classes)`,
which `apply_fsdp2` calls, and the names of the fused forward functions, which verl puts into the
model's class before that.
"""

from typing import Any

from verl_gdpo.hooks.extend import Function

FUSED_FORWARDS = ("forward_with_torch_backend", "forward_with_triton_backend")


def keep_head_in_root(original: Function, model: Any, classes: Any) -> list[Any]:
    """Leave out the output embeddings of a model that runs with fused kernels."""
    targets: list[Any] = original(model, classes)
    if hasattr(model, "get_base_model"):  # of LoRA
        model = model.get_base_model()
    if type(model).forward.__name__ not in FUSED_FORWARDS:
        return targets
    head = model.get_output_embeddings()
    return [module for module in targets if module is not head]
