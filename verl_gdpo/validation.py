"""verl 0.9.0 cannot average a reward that some validation samples lack; later versions can.

Relies on verl 0.9.0 `process_validation_metrics(data_sources, sample_uids, infos_dict)`, which both
trainers import by name and which treats each column of `infos_dict` by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verl
import wrapt
from packaging.version import Version


def average_what_is_present(trainer_module: Any) -> None:
    if Version(verl.__version__) < Version("0.9.1"):
        wrapt.wrap_function_wrapper(trainer_module, "process_validation_metrics", present_only)


def present_only(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """The result of `wrapped`, with each column that holds None over the other samples alone."""
    arguments = (
        dict(zip(("data_sources", "sample_uids", "infos_dict"), args, strict=False)) | kwargs
    )
    sources, uids = arguments["data_sources"], arguments["sample_uids"]
    infos: Mapping[str, Sequence[Any]] = arguments["infos_dict"]
    with_gaps = [name for name, column in infos.items() if any(v is None for v in column)]
    whole = {name: column for name, column in infos.items() if name not in with_gaps}
    result = wrapped(sources, uids, whole)
    for name in with_gaps:
        rows = [i for i, value in enumerate(infos[name]) if value is not None]
        column = {name: [infos[name][i] for i in rows]}
        part = wrapped([sources[i] for i in rows], [uids[i] for i in rows], column)
        for source, metrics in part.items():
            result[source].update(metrics)
    return result
