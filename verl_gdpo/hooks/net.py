"""The net under the table of `plugin.py`: it finds where verl goes past a function of ours.

A verl may keep a name and call another function in its place. No look at names finds that, and then
nothing of ours is called there. Each row of the table says what is lost: `Extension.lost`.

At the start, `warn_of_idle_rows` reads verl's code, and warns of each row past which verl seems to
go. Of a method that anybody may call, such as `fit`, the first step warns. There, what the missing
function would have done is asked for in the others, so that a row without which other numbers would
be trained (`Extension.ends_run`) ends the run:
- the estimator and the step of a batch look for each other, and for verl's method around them;
- a batch has to bring the marks of our agent loop workers;
- the reward workers are asked which manager they have.
"""

import functools
import inspect
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from omegaconf import OmegaConf

from verl_gdpo.hooks import extend
from verl_gdpo.hooks.extend import Extension
from verl_gdpo.hooks.refusal import versions, warn

TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer",
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
}
VERLS_ESTIMATOR = "compute_gdpo_outcome_advantage"
# Our functions that are called when a run is started.
OF_DRIVER = "verl_gdpo.hooks.driver:"
# A manager of agent loops of the user's may have workers that are not verl's.
OWN_LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"

# --- in the first step ----------------------------------------------------------------------------


def row_of(path: str) -> Extension:
    """Return the row of the core table for a name of verl, as FUNCTION or CLASS.METHOD."""
    for extension in extend.table:
        if extension.path == path and extension.table == "core":
            return extension
    raise KeyError(path)


def end_run(path: str) -> NoReturn:
    """Raise RuntimeError: verl goes past a function of ours.

    Args:
        path: FUNCTION or CLASS.METHOD, as in the table.
    """
    extension = row_of(path)
    raise RuntimeError(
        f"gdpo: this verl goes past ours for {extension.module}:{path} ({versions()}): "
        f"{extension.lost}. Take a version of verl that was tested. If code of yours calls "
        "verl's function in another way, let it call the one of this name"
    )


def running_trainer() -> Any:
    """Return the trainer whose method of verl's has called this, at any depth; None if none has.

    Frames are the one thing that no row of the table has to hand over.
    """
    kinds = []
    for module, name in TRAINERS.items():
        if module in sys.modules:
            kinds.append(getattr(sys.modules[module], name))
    frame = inspect.currentframe()
    while frame is not None:
        if _is_of_verl(frame.f_globals.get("__name__")):
            owner = frame.f_locals.get("self")
            if isinstance(owner, tuple(kinds)):
                return owner
        frame = frame.f_back
    return None


def refuse_v1_without_step() -> None:
    """Raise RuntimeError if a V1 trainer with gdpo computes advantages without a step of ours."""
    # Without gdpo, this is called at each step, and to read a frame's variables also keeps them.
    if "PPOTrainer" not in extend.extended:
        return
    if extend.record_of(running_trainer()) is not None:
        end_run("PPOTrainer._compute_advantage")


def refuse_unknown_trainer() -> None:
    """Raise RuntimeError if advantages with gdpo are of a trainer of verl's that we do not know.

    Without a trainer, they are of a loop of the user's. So they are for a trainer whose
    `_create_dataloader` does not call verl's.
    """
    trainer = running_trainer()
    if trainer is None:
        return
    kind = type(trainer)
    if not hasattr(kind, "_create_dataloader"):
        end_run("PPOTrainer.__init__")
    owner = "RayPPOTrainer"
    # It loads no rows, and is extended by its constructor.
    made_by = "_create_dataloader"
    if kind.__name__ == "FullyAsyncTrainer":
        owner = kind.__name__
        made_by = "__init__"
    if extend.record_of(trainer) is not None:
        end_run(f"{owner}.fit")
    if _is_of_verl(getattr(kind, made_by).__module__):
        end_run(f"{owner}.{made_by}")


def refuse_unseen_batch(trainer: Any) -> None:
    """Raise RuntimeError if a method of verl's legacy trainer opened no step for a batch.

    A `fit` of the user's may call an estimator itself.
    """
    if extend.record_of(trainer) is not None and running_trainer() is trainer:
        end_run("compute_advantage")


def refuse_foreign_estimator(adv_estimator: str) -> None:
    """Raise RuntimeError if verl would not find our estimator. Other estimators are verl's own."""
    if adv_estimator != "gdpo":
        return
    core_algos = sys.modules.get("verl.trainer.ppo.core_algos")
    if core_algos is None:
        return
    estimator = core_algos.get_adv_estimator_fn(adv_estimator)
    if not estimator.__module__.startswith("verl_gdpo."):
        end_run("get_adv_estimator_fn")


@contextmanager
def naming_verls_estimator() -> Iterator[None]:
    """Raise RuntimeError where verl's own gdpo has failed in the block: ours was to be called.

    On V1, it always fails, as it gets no prompts.
    """
    try:
        yield
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == VERLS_ESTIMATOR:
                end_run("get_adv_estimator_fn")
        raise


def refuse_unmarked_rows(config: Any, *, is_marked: bool) -> None:
    """Raise RuntimeError if no row of a batch was in our agent loop workers."""
    if not is_marked and not OmegaConf.select(config, OWN_LOOPS):
        end_run("AgentLoopWorker._compute_score")


# --- at the start ---------------------------------------------------------------------------------

_told: set[Extension] = set()  # of which this process has warned


def warn_of(path: str) -> None:
    """Warn once of a function past which verl goes, with what is lost.

    Args:
        path: FUNCTION or CLASS.METHOD, as in the table.
    """
    extension = row_of(path)
    if extension in _told:
        return
    _told.add(extension)
    lost = extension.lost
    if extension.ends_run:
        lost += "; the first step ends the run if verl does not call it"
    warn(f"this verl seems to go past ours for {extension.module}:{extension.path}: {lost}")


def warn_of_idle_rows() -> None:
    """Warn of functions of the table that are not in their place, or that no code of verl calls."""
    uses = uses_of_names()
    for extension in extend.table:
        if extension.table != "core" or not extension.replacement or extension.at_construction:
            continue
        place = extend.place_of(extension)
        # A module that is loaded later is extended then.
        if place is None:
            continue
        owner, name = place
        is_ours = extend.has_ours(getattr(owner, name), extension)
        # What is called when a run is started is called by modules that need not be loaded here.
        is_of_driver = extension.replacement.startswith(OF_DRIVER)
        if not is_ours or (not is_of_driver and _is_idle(owner, name, uses)):
            warn_of(extension.path)


def warn_of_idle_methods(instance: Any, kind: str) -> None:
    """Do the same for the methods of a trainer, or of its buffer, that `extend_instance` has."""
    uses = uses_of_names()
    for extension in extend.rows_of_kind(kind):
        if extension.table != "core":
            continue
        owner = extend.owner_of_method(type(instance), extension.name)
        is_ours = owner is not None and _is_extended(vars(owner)[extension.name], extension.name)
        if not is_ours or _is_idle(type(instance), extension.name, uses):
            warn_of(extension.path)


def _is_extended(method: Any, name: str) -> bool:
    """Return whether ours stands for a method: of any row, as `FullyAsyncTrainer.fit` has its own.

    Then the row of the class that it is derived from finds it done; see `extend_instance`.
    """
    for extension in extend.table:
        is_for_name = extension.table == "core" and extension.name == name
        if is_for_name and extend.has_ours(method, extension):
            return True
    return False


def warn_of_idle_actor(instance: Any) -> None:
    """Do the same for the class that Ray has sent to an actor: its module there has another one."""
    kinds = type(instance).__mro__
    uses: Uses = defaultdict(set)
    for kind in kinds:
        _note_uses(uses, kind, list(vars(kind).values()))
    for extension in extend.table:
        if extension.table != "core" or not extension.replacement or extension.at_construction:
            continue
        class_name = extension.path.rpartition(".")[0]
        for kind in kinds:
            # A class of another module may have the same name.
            if kind.__name__ == class_name and kind.__module__ == extension.module:
                is_ours = extend.has_ours(getattr(kind, extension.name), extension)
                if not is_ours or _is_idle(kind, extension.name, uses):
                    warn_of(extension.path)
                break


def warn_of_idle_start() -> None:
    """Do the same for what verl's main module calls when it starts a run, in its own process."""
    main = verls_main()
    if main is None:
        return
    used: set[str] = set()
    for code in _codes_of(list(vars(main).values()), of=main):
        used |= _names_in(code)
    for extension in extend.table:
        if extension.table == "core" and extension.replacement.startswith(OF_DRIVER):
            is_ours = extend.has_ours(getattr(main, extension.name, None), extension)
            if not is_ours or extension.name not in used:
                warn_of(extension.path)


def verls_main() -> ModuleType | None:
    """Return the module `__main__` if it is the one that starts verl's PPO."""
    main = sys.modules["__main__"]
    verls = Path(sys.modules["verl"].__path__[0], "trainer", "main_ppo.py").resolve()
    own = Path(getattr(main, "__file__", None) or "").resolve()
    return main if own == verls else None


Uses = dict[str, set[Any]]


def _is_idle(owner: Any, name: str, uses: Uses) -> bool:
    """Return whether no code of verl uses a name.

    Args:
        owner: the module of a function, which any other may use. A method with a name of its own
            is used by a method of the same object; others are called from anywhere.
    """
    if isinstance(owner, ModuleType):
        return not uses.get(name)
    if not name.startswith("_") or name.startswith("__"):
        return False
    for user in uses.get(name, ()):
        if isinstance(user, type) and (issubclass(user, owner) or issubclass(owner, user)):
            return False
    # A class of the user's may use it, and what that does is not known here.
    return _is_of_verl(owner.__module__)


@functools.cache
def uses_of_names() -> Uses:
    """Return {name: the modules and classes of verl with a function that uses it}.

    A function of the same name does not count, as a method that calls the one it overrides.
    """
    uses: Uses = defaultdict(set)
    for name, module in list(sys.modules.items()):
        if not _is_of_verl(name):
            continue
        for value in list(vars(module).values()):
            owner: Any = module
            members = [value]
            # Ray has the methods of an actor in a class of its own.
            value = getattr(getattr(value, "__ray_metadata__", None), "modified_class", value)
            if isinstance(value, type):
                owner = value
                members = list(vars(value).values())
            _note_uses(uses, owner, members)
    return uses


def _note_uses(uses: Uses, owner: Any, members: list[Any]) -> None:
    """Add the names that a module or a class uses in these functions of verl's."""
    for code in _codes_of(members):
        for used in _names_in(code):
            if used != code.co_name:
                uses[used].add(owner)


def _codes_of(members: list[Any], of: ModuleType | None = None) -> Iterator[CodeType]:
    """Yield the code of verl's own functions among these, below whatever stands around them.

    Args:
        of: verl's main module, whose functions have another name for it.
    """
    known = {getattr(of, "__name__", None)}
    for member in members:
        if isinstance(member, property):
            member = member.fget
        try:
            function = inspect.unwrap(getattr(member, "__func__", member))
        except ValueError:
            continue
        if not inspect.isfunction(function):
            continue
        if _is_of_verl(function.__module__) or function.__module__ in known:
            yield function.__code__


def _names_in(code: CodeType) -> set[str]:
    """Return the names that a function uses, with the functions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _is_of_verl(module: str | None) -> bool:
    return str(module).partition(".")[0] == "verl"
