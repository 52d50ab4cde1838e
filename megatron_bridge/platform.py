# SPDX-License-Identifier: Apache-2.0
"""Makes megatron-core 0.19 run on CPU with gloo; does nothing where CUDA is used.

Megatron-core names CUDA in about two hundred places (``device="cuda"``, ``torch.cuda.current_device()``, streams, RNG
states). Instead of patching each, every loaded ``megatron.core.*`` module gets another global ``torch``: a proxy whose
``cuda`` has CPU semantics and whose factory functions put "cuda" tensors on the CPU. Nothing outside ``megatron.core``
sees it. Modules that are imported later get it through an import hook. What a module-level name cannot reach
(``Tensor.cuda``, ``Tensor.type``, functions bound by ``from torch.cuda import``) is replaced one by one, for callers in
``megatron.core`` only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import torch

from megatron_bridge.notices import quiet_known_messages

_PREFIX = "megatron.core"
_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)

_applied = False


def prepare_platform(device: Literal["auto", "cpu", "cuda"] = "auto") -> None:
    """Prepares megatron-core for the device that this process uses.

    Idempotent and cheap. Call it before the first use of ``megatron.core``; later imports are covered.

    Args:
        device: ``"cpu"`` forces the CPU semantics (also on a machine with a GPU), ``"cuda"`` leaves megatron-core
            untouched, ``"auto"`` takes the CPU only if torch sees no CUDA device.
    """
    quiet_known_messages()
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return
    global _applied
    if not _applied:
        _applied = True
        quiet_known_messages(cpu=True)
        _patch_tensor_methods()
        sys.meta_path.insert(0, _LateImports())
    import megatron.core.tensor_parallel.random
    import megatron.core.transformer.moe.token_dispatcher  # noqa: F401  (binds functions that are replaced below)

    for name in [name for name in sys.modules if _is_megatron(name)]:
        _patch_module(sys.modules[name])


def on_cpu() -> bool:
    """Whether the CPU semantics are in force in this process."""
    return _applied


def _is_megatron(name: object) -> bool:
    return isinstance(name, str) and (name == _PREFIX or name.startswith(_PREFIX + "."))


# -- the proxy ---------------------------------------------------------------------------------------------------------


def _to_cpu(device: Any) -> Any:
    """Maps a device argument that means CUDA (name, index or torch.device) to the CPU."""
    if device is None:
        return None
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if device.type == "cuda" else device


def _cpu_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


class _DeviceMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        real = torch.device(*args, **kwargs)
        return _CPU if real.type == "cuda" else real


class _Device(metaclass=_DeviceMeta):
    """Stands in for ``torch.device``; builds real devices."""


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


class _Stream:
    """A stream or event that orders nothing, because CPU work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    record = wait = synchronize = wait_event = wait_stream = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Stream) -> float:
        del other
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _zero(*args: Any, **kwargs: Any) -> int:
    del args, kwargs
    return 0


def _false(*args: Any, **kwargs: Any) -> bool:
    del args, kwargs
    return False


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _null_context(*args: Any, **kwargs: Any) -> Generator[None]:
    del args, kwargs
    yield


class _ModuleProxy(types.ModuleType):
    """A module that answers some names itself and takes (and keeps) the others from the real module."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__["_real"] = real
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_real"], name)
        self.__dict__[name] = value
        return value


@functools.cache
def _torch_proxy() -> _ModuleProxy:
    rng = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    nvtx = {"range_push": _nothing, "range_pop": _nothing, "range": _null_context, "mark": _nothing}
    cuda = {
        **rng,
        "random": _ModuleProxy(torch.cuda.random, rng),
        "nvtx": _ModuleProxy(torch.cuda.nvtx, nvtx),
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "is_available": _false,
        "is_initialized": _false,
        "is_current_stream_capturing": _false,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_stream": _nothing,
        "reset_peak_memory_stats": _nothing,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _null_context,
        "device": _null_context,
        "current_stream": lambda *a, **k: _Stream(),
        "default_stream": lambda *a, **k: _Stream(),
        "memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_allocated": _zero,
        "max_memory_reserved": _zero,
        "memory_stats": lambda *a, **k: {},
    }
    overrides: dict[str, Any] = {name: _cpu_factory(getattr(torch, name)) for name in _FACTORIES}
    overrides.update(cuda=_ModuleProxy(torch.cuda, cuda), device=_Device, autocast=_Autocast)
    return _ModuleProxy(torch, overrides)


# -- patches -----------------------------------------------------------------------------------------------------------


def _patch_module(module: types.ModuleType) -> None:
    """Gives one megatron-core module the proxy, and its bound functions their CPU versions. Idempotent."""
    names = vars(module)
    if names.get("torch") is torch:
        names["torch"] = _torch_proxy()
    for name in ("_set_cuda_rng_state", "maybe_move_tensor_to_cpu"):
        if name in names:
            names[name] = _set_rng_state if name == "_set_cuda_rng_state" else _keep_on_cpu
    for name, value in list(names.items()):
        original = _uncompiled(value)
        if original is not None:
            names[name] = original
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                original = _uncompiled(member)
                if original is not None:
                    setattr(value, attribute, original)


def _uncompiled(value: Any) -> Callable[..., Any] | None:
    """The function below ``torch.compile`` (mcore's jit_fuser), which costs minutes of C++ compilation on a CPU."""
    return (
        getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, types.FunctionType) else None
    )


def _keep_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's ``maybe_move_tensor_to_cpu`` for tensors that are there already (gloo wants lists or numpy splits)."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _called_from(prefix: str) -> bool:
    """Whether the caller of our caller is a module below ``prefix``."""
    name = sys._getframe(2).f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(prefix)


def _patch_tensor_methods() -> None:
    """``Tensor.cuda`` is the identity, and ``Tensor.type()`` says 'torch.cuda.*', for megatron-core's eyes only."""
    real_cuda, real_type = torch.Tensor.cuda, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _called_from(_PREFIX):
            return self
        return real_cuda(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if not args and not kwargs and _called_from(_PREFIX + ".optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.cuda = cuda  # type: ignore[method-assign]
    torch.Tensor.type = type_  # type: ignore[method-assign]


class _PatchingLoader(importlib.abc.Loader):
    """Runs the module's own loader, then patches the module."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.real.exec_module(module)
        _patch_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _LateImports(importlib.abc.MetaPathFinder):
    """Patches megatron-core modules that are imported after ``prepare_platform``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_megatron(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec
