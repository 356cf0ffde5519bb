"""Entry point `verl_gdpo_run` of the group `verl.plugins`: what a run needs that is not gdpo.

It has the record of a gdpo run's start, which a resume is compared with, the folder of a run of our
recipes, checkpoints of a resumed run, packed attention and fused kernels. Each function looks at
the run's configuration, or at what was handed over to its process, and acts where it is asked to.

If verl lacks one of these names, a warning says what is lost, and nothing is refused: gdpo does not
need them. Where only `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin` is set, this table is not loaded.
"""

import verl
from packaging.specifiers import SpecifierSet

from verl_gdpo import REQUIRED_VERL
from verl_gdpo.hooks.extend import Extension, extend_when_imported
from verl_gdpo.hooks.refusal import warn
from verl_gdpo.tools.run import stacks

_RECORD = (
    "the record of a run's start. Without it, no resume is compared with the run, and verl's "
    "loggers write into the current folder"
)
_CHECKPOINTS = (
    "checkpoints that are looked through before they are loaded. Without it, verl may load one "
    "that is not whole"
)
_ATTENTION = (
    "attention=packed_sdpa, and for fused kernels under FSDP2. If a model cannot be built "
    "or trained, set attention=flash_attn and actor_rollout_ref.model.use_fused_kernels=False"
)
_KEPT_CHECKPOINTS = (
    "max_actor_ckpt_to_keep in a resumed run. Without it, verl keeps so many more after "
    "each resume: delete old ones yourself"
)

EXTENSIONS = (
    Extension(
        "verl.trainer.main_ppo",
        "run_ppo",
        "verl_gdpo.tools.run.record:record_and_run",
        needs=("config",),
        others=("task_runner_class",),
        only_for=_RECORD,
        table="run",
    ),
    Extension(
        "verl.trainer.ppo.v1.trainer_base",
        "PPOTrainer._init_dataloader",
        "verl_gdpo.tools.run.checkpoint_loading:check_and_load_rows",
        at_construction=True,
        only_for=_CHECKPOINTS,
        table="run",
    ),
    Extension(
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._create_dataloader",
        "verl_gdpo.tools.run.checkpoint_loading:check_and_load_rows",
        others=("train_dataset", "val_dataset", "collate_fn", "train_sampler"),
        only_for=_CHECKPOINTS,
        table="run",
    ),
    Extension(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._build_module",
        "verl_gdpo.tools.run.attention:build_with_ours",
        only_for=_ATTENTION,
        table="run",
    ),
    Extension(
        "verl.utils.fsdp_utils",
        "_select_fsdp2_wrap_targets",
        "verl_gdpo.tools.run.attention:keep_head_in_root",
        needs=("model",),
        others=("fsdp_transformer_layer_cls_to_wrap",),
        only_for=_ATTENTION,
        table="run",
    ),
    Extension(
        "verl.trainer.ppo.utils",
        "need_reference_policy",
        "verl_gdpo.tools.run.attention:ask_for_head_in_root",
        needs=("config",),
        only_for=_ATTENTION,
        table="run",
    ),
    Extension(
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        "FSDPCheckpointManager.load_checkpoint",
        "verl_gdpo.tools.run.checkpoint_loading:load_and_count",
        needs=("local_path",),
        only_for=_KEPT_CHECKPOINTS,
        table="run",
    ),
    Extension(
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        "FSDPCheckpointManager.ensure_checkpoint_capacity",
        needs=("max_ckpt_to_keep",),
        only_for=_KEPT_CHECKPOINTS,
        table="run",
    ),
    Extension(
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        "FSDPCheckpointManager.register_checkpoint",
        needs=("new_path", "max_ckpt_to_keep"),
        only_for=_KEPT_CHECKPOINTS,
        table="run",
    ),
)


def _activate() -> None:
    stacks.register_if_asked()
    if SpecifierSet(REQUIRED_VERL).contains(verl.__version__, prereleases=True):
        extend_when_imported(EXTENSIONS, on_missing=warn)


_activate()
