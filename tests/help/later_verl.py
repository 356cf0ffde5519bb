"""The functions of a later verl, which take more than those that we know."""

import inspect

# What Ray adds to the methods of actors.
OF_RAY = "_ray_trace_ctx"
MORE = ("first", "last", "keyword")


def later_signature(own, is_method):
    """The signature of a function of verl with three parameters more.

    One stands before those that we know, one behind them, and one is a keyword.
    """
    first = inspect.Parameter("first", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    last = inspect.Parameter("last", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    keyword = inspect.Parameter("keyword", inspect.Parameter.KEYWORD_ONLY)
    positional, others = [], []
    for parameter in inspect.signature(own).parameters.values():
        if parameter.name == OF_RAY:
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            positional.append(parameter)
        else:
            others.append(parameter)
    begin = positional[: int(is_method)]
    positional = [*begin, first, *positional[len(begin) :], last]
    keywords = [each for each in others if each.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [each for each in others if each.kind is inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*positional, *keywords, keyword, *rest])
