"""Attention over packed rows without flash-attn, which attention a run takes, and fused kernels.

With `use_remove_padding`, verl puts the rows of a micro-batch behind one another into one long row,
in which `position_ids` begin anew with each of them. transformers has two ways to compute it:
flash-attn, or a mask whose size is the square of the whole length. Here PyTorch's attention is
called once a row, so that nothing is padded and nothing has to be compiled.

verl's fused kernels do not run under FSDP2 with models whose embeddings are not tied: the fused
forward reads `lm_head.weight` and never calls `lm_head`, which verl makes an FSDP2 unit of its own,
whose weight is gathered only when the unit is called ("mixed torch.Tensor and DTensor"). Here
`lm_head` stays in the unit of the whole model.

Other runs are left alone. The process that builds a model sees the block `model` alone, so that the
block says what a run asks for:

    override_config.attn_implementation: packed_sdpa
    fused_kernel_options.head_in_root: true    # of our recipes; in a run with gdpo, we put it there

verl reads one key of `fused_kernel_options`, and leaves the others. As part of verl's configuration
the key reaches every worker, on any cluster and whoever has called `ray.init`.

Relies on verl 0.9:
- `FSDPEngine._build_module` makes the model, with `self.model_config`, and puts the fused forward
  function into the model's class. Then `verl.utils.fsdp_utils.apply_fsdp2` calls
  `_select_fsdp2_wrap_targets(model, classes)`;
- each trainer calls `need_reference_policy(config)` before it makes workers.
On transformers 5: `AttentionInterface`, `AttentionMaskInterface`, and that a model's layers hand
`position_ids` on to the attention function.
"""

import importlib
import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, flag_override, open_dict

from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import Function
from verl_gdpo.hooks.refusal import names_gdpo

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "actor_rollout_ref.model"
KEY = f"{MODEL}.override_config.attn_implementation"
ULYSSES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size",
)
FUSED_KERNEL_OPTIONS = f"{MODEL}.fused_kernel_options"
HEAD_IN_ROOT = "head_in_root"  # the key in these options
AUTO = "auto"
FLASH = "flash_attention_2"
SDPA = "packed_sdpa"


# --- which one -----------------------------------------------------------------------------------


def choose(config: Any) -> str | None:
    """Put the attention that "auto" stands for into verl's configuration; say which, and why.

    Raises:
        ValueError: ours with verl's sequence parallelism (Ulysses), which is for flash-attn alone.
    """
    message = None
    if OmegaConf.select(config, KEY) == AUTO:
        message = _replace_auto(config)
    split = [key for key in ULYSSES if (OmegaConf.select(config, key) or 1) > 1]
    if OmegaConf.select(config, KEY) == SDPA and split:
        raise ValueError(
            f"{split[0]}={OmegaConf.select(config, split[0])}: verl splits rows over GPUs for "
            f"flash-attn alone, and {KEY}={SDPA}. Set it to 1, or install the package flash-attn "
            "in a build for this torch, and set attention=flash_attn"
        )
    return message


def _replace_auto(config: Any) -> str:
    """Put what this machine can run in the place of "auto"; say which, and why."""
    why_no_flash: str | None = "trainer.device=cpu"
    if config.trainer.device != "cpu":
        why_no_flash = _no_flash_attn()
    if why_no_flash is None:
        chosen = FLASH
        reason = "flash_attn can be imported"
    else:
        chosen = SDPA
        reason = why_no_flash
    with open_dict(config):
        OmegaConf.update(config, KEY, chosen)
    return f"attention: {chosen}, since {reason}"


def _no_flash_attn() -> str | None:
    """Why flash-attn cannot be used here; None if it can."""
    try:
        importlib.import_module("flash_attn")
    except Exception as error:  # one that was built for another torch fails in many ways
        return f"flash_attn cannot be imported ({type(error).__name__}: {error})"
    return None


# --- how it is computed --------------------------------------------------------------------------


def build_with_ours(call: Call) -> Any:
    """Build a model with what its run asks for."""
    model_config = call.instance.model_config
    overridden = model_config.override_config or {}
    is_packed = overridden.get("attn_implementation") == SDPA
    if is_packed:
        make_known()
    model = call.hand_on()
    if is_packed:
        _forget_name(model)
    options = model_config.fused_kernel_options or {}
    if options.get(HEAD_IN_ROOT):
        model.verl_gdpo_head_in_root = True  # `keep_head_in_root` gets nothing but the model
    return model


def _forget_name(model: Any) -> None:
    """Take our attention out of the configuration of a model.

    A checkpoint's config.json must not name it, because it is unknown where that is loaded. verl
    copies `override_config` into the configuration, and transformers has read it by now.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attn_implementation", None) == SDPA:
        del config.attn_implementation


def make_known() -> None:
    """Make it known to transformers, whose models then find it by its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SDPA, packed_sdpa)
    AttentionMaskInterface.register(SDPA, mask)


def mask(**call: Any) -> Any:
    """Return no mask where a row of rows attends to itself, and elsewhere that of sdpa.

    transformers calls it once a pass. Padded rows, a cache, sliding windows and masks of a model's
    own need the mask.
    """
    from transformers.masking_utils import sdpa_mask

    of_itself = call["batch_size"] == 1 and call["q_length"] == call["kv_length"]
    is_causal = call.get("local_size") is None and not call.get("use_vmap")  # as with images
    if of_itself and is_causal and call.get("attention_mask") is None:
        return None
    return sdpa_mask(**call)


def packed_sdpa(
    module: Any,
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    attention_mask: "Tensor | None",
    position_ids: "Tensor | None" = None,
    **options: Any,
) -> tuple["Tensor", None]:
    """PyTorch's attention, once for each row of a pack; also without a pack.

    Args:
        module: the layer of the model, which knows its numbers of heads.
        query: [1, heads, tokens, width of a head].
        key: [1, heads of keys, tokens, width of a head].
        value: as `key`.
        attention_mask: None for a pack.
        position_ids: [1, tokens]; they begin anew with each row.
        options: dropout, scaling and others of transformers.

    Returns:
        [1, tokens, heads, width of a head], and None in the place of weights.

    Raises:
        ValueError: the model does not hand `position_ids` on, so the rows cannot be told apart; or
            it hands on what PyTorch's attention does not know.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise ValueError(
                f"{type(module).__name__} hands {option!r} to its attention, which PyTorch's "
                "attention does not know: install flash-attn, and set attention=flash_attn"
            )
    is_pack = attention_mask is None and query.shape[0] == 1 and query.shape[2] == key.shape[2]
    if not is_pack:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    lengths = [end - start for start, end in pairwise(_bounds(module, position_ids))]
    # The gradient of `split` is one tensor, and that of N slices would be N tensors of all tokens.
    queries = torch.split(query, lengths, dim=2)
    keys = torch.split(key, lengths, dim=2)
    values = torch.split(value, lengths, dim=2)
    outputs = []
    for row_query, row_key, row_value in zip(queries, keys, values, strict=True):
        output, _ = sdpa_attention_forward(module, row_query, row_key, row_value, None, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _bounds(module: Any, position_ids: "Tensor | None") -> list[int]:
    """Where rows begin, and where the last one ends; a row begins where positions do not go on."""
    if position_ids is None or position_ids.dim() != 2:
        raise ValueError(
            f"{type(module).__name__} does not hand on position_ids of shape (1, tokens), so the "
            f"rows of a pack cannot be told apart. Set {KEY}=sdpa and {MODEL}.use_remove_padding="
            "False, or attention=flash_attn"
        )
    # All layers get the same tensor, and reading it waits for the GPU.
    bounds: list[int] | None = getattr(position_ids, "_verl_gdpo_bounds", None)
    if bounds is None:
        breaks = (position_ids[0].diff() != 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), position_ids.shape[1]]
        position_ids._verl_gdpo_bounds = bounds  # type: ignore[attr-defined]
    return bounds


# --- fused kernels ------------------------------------------------------------------------------


def ask_for_head_in_root(call: Call) -> Any:
    """Let a run with gdpo ask for `keep_head_in_root`; what somebody has written there stays."""
    config = call["config"]
    if names_gdpo(config) and OmegaConf.select(config, f"{MODEL}.use_fused_kernels"):
        options = OmegaConf.select(config, FUSED_KERNEL_OPTIONS)
        if options is not None and HEAD_IN_ROOT not in options:
            with flag_override(options, ["struct", "readonly"], False):
                options[HEAD_IN_ROOT] = True
    return call.hand_on()


def keep_head_in_root(call: Call) -> Any:
    """Leave out `lm_head` where the run asks for it, and verl's forward needs it."""
    model = call["model"]
    targets = call.hand_on()
    if hasattr(model, "get_base_model"):  # of LoRA
        model = model.get_base_model()
    is_asked = getattr(model, "verl_gdpo_head_in_root", False)
    if not is_asked or not reads_weight_of_head(type(model).forward):
        return targets
    return [module for module in targets if module is not model.lm_head]


def reads_weight_of_head(forward: Function) -> bool:
    """Whether a model's forward is verl's, and reads `self.lm_head.weight` instead of calling it.

    verl has such a function for each kind of model, and may change it in a later version.
    """
    forward = inspect.unwrap(forward)
    if not getattr(forward, "__module__", "").startswith("verl.models."):
        return False
    names_in_code = forward.__code__.co_names
    return "lm_head" in names_in_code and "weight" in names_in_code
