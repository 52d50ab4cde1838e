# SPDX-License-Identifier: Apache-2.0
"""Creating one worker: its class by name, its arguments, its place."""

from __future__ import annotations

import importlib
from pathlib import PurePath
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_BY_VALUE = (bool, int, float, str, type(None), PurePath, ray.ObjectRef)


class RayWorkerBuilder:
    """Creates workers of one class with the same arguments.

    Args:
        ray_actor_class_fqn: "package.module.ClassName" of a ``@ray.remote`` class, or of a plain one.
        *args: constructor arguments; large ones are stored once for all workers.
        **kwargs: constructor keyword arguments, likewise.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float | int,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> tuple[ray.ObjectRef, ActorHandle]:
        """Start one worker without waiting for it.

        A worker class may define a static ``configure_worker(num_gpus, bundle_indices, num_gpus_per_node) ->
        (resources, env_vars, init_kwargs[, runtime_env])``, which adjusts these for a worker.

        Args:
            placement_group: where the worker goes.
            placement_group_bundle_index: which bundle of it.
            num_gpus: share of a GPU.
            bundle_indices: (node, bundles) of a worker that drives several bundles.
            **extra_options: Ray actor options; ``num_gpus_per_node`` is for ``configure_worker`` only.

        Returns:
            A reference that resolves once the worker is constructed, or raises what its constructor raised; and
            the worker's handle.
        """
        actor_class = load_actor_class(self.ray_actor_class_fqn)
        num_gpus_per_node = extra_options.pop("num_gpus_per_node", 8)
        runtime_env = dict(extra_options.pop("runtime_env", {}))
        options = {"num_gpus": num_gpus, **extra_options}
        kwargs = dict(self.kwargs)
        configure = getattr(actor_class.__ray_metadata__.modified_class, "configure_worker", None)
        if configure is not None:
            resources, env_vars, init_kwargs, *more = configure(num_gpus, bundle_indices, num_gpus_per_node)
            options |= resources or {}
            kwargs |= init_kwargs or {}
            runtime_env |= more[0] if more and more[0] else {}
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **(env_vars or {})}
        actor = actor_class.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group,
                placement_group_bundle_index=placement_group_bundle_index,
                placement_group_capture_child_tasks=False,  # the bundle has no room for more
            ),
            runtime_env=runtime_env,
            **options,
        ).remote(*self.args, **kwargs)
        return actor.__ray_ready__.remote(), actor


def load_actor_class(fqn: str) -> ActorClass:
    """The Ray actor class at ``package.module.ClassName``; a plain class is wrapped.

    Raises:
        ValueError: no such module or class.
    """
    module_name, _, class_name = fqn.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import worker class {fqn!r}: {error}") from error
    if class_name not in vars(module):
        raise ValueError(f"module {module_name} has no class {class_name!r}")
    found = vars(module)[class_name]
    return found if isinstance(found, ActorClass) else ray.remote(found)


def share(value: Any, readers: int) -> Any:
    """An argument as it is sent to ``readers`` workers: stored once for several of them.

    For one worker it goes along with the call, which saves milliseconds (Ray stores what is over 100 KB by itself).
    """
    return value if readers == 1 or isinstance(value, _BY_VALUE) else ray.put(value)
