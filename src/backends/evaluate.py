"""From a public function to its results: the arguments are described, a backend is selected, and the backend runs.

PyTorch's plain tensors take a plan, see `xent.backends.torch.planned`: the call is described when the plan is made.
"""

from typing import Any

from xent.backends import dtensors_of, rank_named, selected
from xent.core.call import Largest, Options, framework_of
from xent.core.describe import describe_top_k
from xent.core.signature import FUNCTIONS, Function
from xent.core.spec import Array, Stats, TopKTeacher

__all__ = ["evaluate"]


def evaluate(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the results of a public function for its arguments, in the order of its parameters."""
    function = FUNCTIONS[name]
    shards = arguments[function.names.index("vocab_parallel")]
    if shards is None:
        return _evaluated(function, arguments)
    with rank_named(shards, arguments[0]):
        return _evaluated(function, arguments)


def _evaluated(function: Function, arguments: tuple[Any, ...]) -> Any:
    if framework_of(arguments[0]) == "torch" and function.describe is not describe_top_k:
        from xent.backends.torch import planned

        results = planned.evaluate(function, arguments, selected)
        if results is not None:
            return _returned(*results)
    named = dict(zip(function.names, arguments, strict=True))
    sources = function.names[: 2 if "linear_weight" in named else 1]
    if hasattr(named[sources[-1]], "placements"):
        cut = dtensors_of(named[sources[-1]], named.get("axis", 0), len(sources) > 1)
        if cut is not None:
            return cut(function.call, *map(named.pop, sources), named)
    defaults = zip(function.names, function.defaults, strict=True)
    call = function.describe(named, [name for name, default in defaults if named[name] is not default])
    backend = selected(named["backend"], call, arguments[0])
    if isinstance(call.target, Largest):
        return TopKTeacher(*backend.top_k(call))
    return _returned(call.options, *backend.run(call))


def _returned(options: Options, loss: Array, stats: Stats) -> Any:
    """Return the results of a function in the form that it returns."""
    requested = options.stats
    if not options.is_log_probs:
        return (loss, stats) if requested else loss
    log_probs = 0 - loss
    if not requested:
        return log_probs
    results = [log_probs]
    if "entropy" in requested:
        results.append(stats.entropy)
    others = {name: getattr(stats, name) for name in requested if name != "entropy"}
    if others:
        results.append(Stats(**others))
    return tuple(results)
