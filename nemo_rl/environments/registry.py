# SPDX-License-Identifier: Apache-2.0
"""Environments by name: the keys of the ``env`` section."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl.environments.interfaces import EnvironmentInterface

logger = logging.getLogger(__name__)

_ENVIRONMENTS = {
    "math": "nemo_rl.environments.math_environment.MathEnvironment",
    "math_default": "nemo_rl.environments.math_environment.MathEnvironment",
}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Make the key ``env.<env_name>`` mean the class at the dotted path ``actor_class_fqn``.

    Raises:
        ValueError: If the name is taken by another class.
    """
    if _ENVIRONMENTS.setdefault(env_name, actor_class_fqn) != actor_class_fqn:
        raise ValueError(f"an environment named {env_name!r} is registered already; choose another name")


def environment_class(env_name: str) -> type[EnvironmentInterface[Any]]:
    """The class registered as ``env_name``.

    Raises:
        ValueError: If there is none, or it cannot be imported.
    """
    if env_name not in _ENVIRONMENTS:
        raise ValueError(f"env.{env_name} is unknown; use one of {', '.join(sorted(_ENVIRONMENTS))}")
    module, _, name = _ENVIRONMENTS[env_name].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"env.{env_name}: {_ENVIRONMENTS[env_name]} cannot be imported: {error}") from error


def create_env(env_name: str, config: Any, *, as_actor: bool = False) -> EnvironmentInterface[Any]:
    """Make one environment.

    Args:
        env_name: Key of the ``env`` section.
        config: Its value, passed to the class as its only argument.
        as_actor: Whether it runs as a Ray actor (Ray must be initialised), else in this process.

    Returns:
        The environment, or a proxy with the same interface.
    """
    cls = environment_class(env_name)
    if not as_actor:
        return cls(config)  # type: ignore[call-arg]
    from nemo_rl.environments.remote import RemoteEnvironment

    return RemoteEnvironment(env_name, cls, config)


def create_envs(
    env_config: Mapping[str, Any], env_of_task: Mapping[str, str], *, as_actors: bool = False
) -> dict[str, EnvironmentInterface[Any]]:
    """One environment per key of ``env`` that a task uses.

    Args:
        env_config: The section ``env``.
        env_of_task: Key of ``env`` per task (``ResponseData.env_of_task``).
        as_actors: Whether they run as Ray actors.

    Returns:
        The environment of each task; tasks with the same key share one.
    """
    made = {
        name: create_env(name, env_config[name], as_actor=as_actors) for name in set(env_of_task.values())
    }
    for name in env_config:
        if name not in made:
            logger.warning("env.%s is configured but no data set uses it", name)
    return {task: made[name] for task, name in env_of_task.items()}
