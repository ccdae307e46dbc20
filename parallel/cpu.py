"""megatron-core without CUDA, for tests, continuous integration and laptops: the only place that adapts it.

megatron-core names CUDA at about a hundred places (`torch.cuda.current_device()`, `device="cuda"`). Its modules get
their own `torch` here: a proxy on which "cuda" means the CPU. The process's real `torch` stays as it is, but for what
no proxy can reach, methods of tensors: while a function of `_USERS_OF_CUDA_TENSORS` runs, and only then,
`torch.Tensor.cuda` and `torch.Tensor.type` are replaced.

Limits: the CPU's random number generator stands in for CUDA's, so that seeding one seeds the other. Not adapted: CUDA
graphs, kernels for mixtures of experts, activation offloading, Megatron-FSDP.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import sys
import threading
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from packaging.specifiers import SpecifierSet

SUPPORTED_VERSIONS = ">=0.16.1,<0.20"

_CPU = torch.device("cpu")

# What the project uses, and what megatron-core itself imports only inside functions, too late to be adapted.
_MODULES = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
)

# Module and function. The first three refuse a `Tensor.type()` without "torch.cuda.", the others call `Tensor.cuda()`.
_USERS_OF_CUDA_TENSORS = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
    ("megatron.core.optimizer.grad_scaler", "DynamicGradScaler.load_state_dict"),
    ("megatron.core.models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
    ("megatron.core.models.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank"),
    ("megatron.core.dist_checkpointing.exchange_utils", "exchange_loaded_tensors_broadcast"),
    ("megatron.core.dist_checkpointing.exchange_utils", "exchange_loaded_tensors_gather_rounds"),
)

# Tensor factories that megatron-core calls with device="cuda".
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")

_REAL_TYPE = torch.Tensor.type
_TENSOR_METHODS_LOCK = threading.RLock()


def adapt_megatron() -> None:
    """Let this process run megatron-core on the CPU. Call it before a model is built; a second call is harmless.

    A later call also adapts the modules of megatron-core that were imported since.

    Raises:
        RuntimeError: CUDA is available, or the installed megatron-core is a version this module does not know.
    """
    if torch.cuda.is_available():
        raise RuntimeError("adapt_megatron() is for machines without CUDA, but torch.cuda.is_available() is true")
    version = importlib.metadata.version("megatron-core")
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(version, prereleases=True):
        raise RuntimeError(
            f"megatron-core {version} is installed, but without CUDA only {SUPPORTED_VERSIONS} is supported: "
            "install such a version, or extend parallel/cpu.py"
        )
    prepare_import()
    for name in _MODULES:
        importlib.import_module(name)
    _adapt_functions()
    _replace_in_megatron("torch", torch, _TORCH)


def prepare_import() -> None:
    """Let megatron-core be imported on a machine without CUDA. Call it before the first import of megatron-core.

    Without it, 0.18 and later need triton, and every process spends seconds importing torch's compiler.
    """
    if not torch.cuda.is_available() and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _UncompiledLoader(SourceFileLoader):
    """Loads a module that calls `torch.compile`, and leaves its functions as they are: no C++ compiler is needed."""

    def exec_module(self, module: types.ModuleType) -> None:
        with patch.object(torch, "compile", lambda function: function):
            super().exec_module(module)


class _TritonLoader(SourceFileLoader):
    """Shows a stand-in for triton while one module loads: seen for longer, it would make torch believe in triton."""

    def exec_module(self, module: types.ModuleType) -> None:
        # One of these modules imports the other: the outer one takes the stand-in away.
        stand_in = {} if "triton" in sys.modules or find_spec("triton") else _stand_in_for_triton()
        sys.modules.update(stand_in)
        try:
            super().exec_module(module)
        finally:
            for name in stand_in:
                del sys.modules[name]


def _stand_in_for_triton() -> dict[str, types.ModuleType]:
    """Enough of triton to define kernels that are never launched."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    vars(triton).update(jit=lambda kernel: kernel, language=language)
    vars(language).update(constexpr=int)
    return {"triton": triton, "triton.language": language}


class _Finder:
    """Finds the modules of megatron-core that need a loader of their own."""

    loaders = types.MappingProxyType(
        {
            "megatron.core.jit": _UncompiledLoader,
            "megatron.core.transformer.moe.router": _UncompiledLoader,
            # Kernels for mixtures of experts: since 0.18 every model imports them, and triton without a guard.
            "megatron.core.transformer.moe.paged_stash": _TritonLoader,
            "megatron.core.transformer.moe.ops.paged_stash": _TritonLoader,
        }
    )

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in self.loaders else None
        if spec is not None and spec.origin is not None:
            spec.loader = self.loaders[name](name, spec.origin)
        return spec


_FINDER = _Finder()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What CUDA's waiting and memory calls amount to on the CPU: there, work is done when the call returns."""


class _Stream:
    """Stands in for CUDA's streams and events."""

    __init__ = wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: object = None) -> "_Stream":
        return _Stream()

    def query(self) -> bool:
        return True


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory for which "cuda" means the CPU. Memory is not pinned: there is no GPU to copy it to."""

    @functools.wraps(factory)
    def create(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        return factory(*args, device=device, **kwargs)

    return create


class _Proxy(types.ModuleType):
    """A module with some names replaced; every other name is the real module's, and fails as it does."""

    def __init__(self, real: types.ModuleType, **replacements: Any) -> None:
        super().__init__(real.__name__)
        vars(self).update(replacements, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_CUDA = _Proxy(
    torch.cuda,
    Event=_Stream,
    Stream=_Stream,
    current_device=lambda: _CPU,
    current_stream=_Stream,
    default_stream=_Stream,
    stream=contextlib.nullcontext,
    synchronize=_nothing,
    empty_cache=_nothing,
    manual_seed=torch.manual_seed,
    get_rng_state=_get_rng_state,
    set_rng_state=_set_rng_state,
)
_TORCH = _Proxy(torch, cuda=_CUDA, **{name: _factory_on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _replace_in_megatron(name: str, old: object, new: object) -> None:
    """Bind `name` to `new` in every imported module of megatron-core where it is `old`."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.core") and vars(module).get(name) is old:
            setattr(module, name, new)


@functools.cache
def _adapt_functions() -> None:
    """Replace the functions that reach CUDA past the name `torch`."""
    for module_name, qualified_name in _USERS_OF_CUDA_TENSORS:
        _wrap(sys.modules[module_name], qualified_name)
    random = sys.modules["megatron.core.tensor_parallel.random"]  # it reads and sets CUDA's generators through torch._C
    _replace_in_megatron("_get_cuda_rng_state", random._get_cuda_rng_state, _get_rng_state)
    _replace_in_megatron("_set_cuda_rng_state", random._set_cuda_rng_state, _set_rng_state)


def _wrap(module: types.ModuleType, qualified_name: str) -> None:
    """Let a function of `module`, or a method of one of its classes, see CUDA tensors while it runs.

    The methods change for all threads; the lock keeps two threads from restoring them in the wrong order.
    """
    class_name, _, name = qualified_name.rpartition(".")
    owner = getattr(module, class_name) if class_name else module
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with (
            _TENSOR_METHODS_LOCK,
            patch.object(torch.Tensor, "type", _cuda_type),
            patch.object(torch.Tensor, "cuda", _stay),
        ):
            return function(*args, **kwargs)

    if class_name:
        setattr(owner, name, wrapped)
    else:
        _replace_in_megatron(name, function, wrapped)


def _cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type` that names the type a CUDA tensor would have."""
    result = _REAL_TYPE(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


def _stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cuda` that leaves the tensor where it is."""
    return tensor
