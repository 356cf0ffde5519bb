"""The sandboxes by name."""

from verl_gdpo.rewards import sandbox_machine


def kind_of(name, allow_weak=False):
    """The kind of this name; it has to be here."""
    found = {kind.name: kind for kind in sandbox_machine.kinds(allow_weak)}
    assert name in found, f"{name} is not on this machine. {sandbox_machine.advice()}"
    return found[name]
