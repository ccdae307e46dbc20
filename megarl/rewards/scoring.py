"""Find the reward a user named, and call it so that exactly one finite float comes back for each response."""

import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from megarl.rewards.rules import Reward, exact_match, sorted_digits

BUILT_IN = {"exact_match": exact_match, "sorted_digits": sorted_digits}


def load_reward(name: str) -> Reward:
    """Return the reward called `name`: a built-in rule, `package.module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: there is no such rule, or it cannot be called with (prompt, response, answer).
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    source, colon, function = name.rpartition(":")
    if not (source and colon and function):
        raise ValueError(f"reward is {name!r}; allowed: {', '.join(BUILT_IN)}, module:function or file.py:function")
    module = _load_file(Path(source), name) if source.endswith(".py") else _load_module(source, name)
    reward = vars(module).get(function)
    if not callable(reward):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"reward is {name!r}; allowed functions of {source}: {', '.join(functions) or 'it has none'}")
    try:
        inspect.signature(reward).bind("prompt", "response", "answer")
    except TypeError as error:
        raise ValueError(f"reward is {name!r} ({error}); allowed: a function of (prompt, response, answer)") from error
    return reward


def score_response(reward: Reward, prompt_id: int, prompt: str, response: str, answer: str) -> float:
    """Return the reward of one response as a float. A bool, an integer or a NumPy number is converted.

    There is no default: None (no opinion), NaN, an infinity or another type stops the run, for a made-up score would be
    trained on.

    Raises:
        ValueError: the rule returned something else than a finite number; names the prompt id.
        RuntimeError: the rule itself raised; names the prompt id, with the rule's own error as the cause.
    """
    try:
        value = reward(prompt, response, answer)
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"the reward failed on a response to prompt {prompt_id}: {error!r}") from error
    if isinstance(value, (numbers.Real, np.bool_)) and math.isfinite(value):
        return float(value)
    raise ValueError(f"the reward of a response to prompt {prompt_id} is {value!r}; allowed: a finite number")


def _load_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"reward is {name!r}: there is no file {str(path)!r}")
    # A name of its own: a file called json.py must not stand in for the module that others import.
    spec = importlib.util.spec_from_file_location(f"reward file {path.resolve()}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward is {name!r}: {str(path)!r} cannot be loaded: {error!r}") from error
    return module


def _load_module(source: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise ValueError(f"reward is {name!r}: there is no module {error.name!r}") from error
