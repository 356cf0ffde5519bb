"""Ours in the place of a function of verl, as `hooks/extend.py` puts it there."""

from verl_gdpo.hooks.call import Call, Parameters


def stand_in(ours, verls, *, like=None):
    """A function that gives a call of `verls` to ours.

    Args:
        like: verl's own function, for a stub `verls` whose parameters have no names.
    """
    parameters = Parameters.of(verls)
    if like is not None:
        parameters = parameters.beside(Parameters.of(like))

    def called(*args, **kwargs):
        return ours(Call(verls, args, kwargs, parameters))

    called.__wrapped__ = verls  # as of `functools.wraps`
    return called
