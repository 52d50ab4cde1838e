# SPDX-License-Identifier: Apache-2.0
"""From a YAML file and ``key=value`` overrides to a frozen, validated config tree.

Composition: ``defaults:`` names parent files (relative to the file, recursive, the last one wins), a mapping that holds
``_override_: true`` replaces its parent's, ``${...}`` interpolates (class defaults count as present), and the resolvers
``add``, ``mul``, ``div`` and ``max`` compute. Overrides are Hydra's: ``a.b=c``, ``++a.b=c`` and ``~a.b``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.utils.config_model import ConfigModel, Violation, fill_derived, section_class
from nemo_rl.utils.config_validate import hints, validate

logger = logging.getLogger(__name__)

_OVERRIDE = re.compile(
    r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)(?:=(?P<value>.*))?$", re.DOTALL
)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message lists every violation.

    Attributes:
        violations: All of them, in the order of the tree.
    """

    def __init__(self, violations: Iterable[Violation], source: str = "") -> None:
        self.violations = list(violations)
        count = len(self.violations)
        head = f"{source or 'config'}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n  ".join([head, *map(str, self.violations)]))


class OverridesError(ConfigError):
    """A command-line override that cannot be parsed or applied."""


def load[T: ConfigModel](path: str | Path, overrides: Sequence[str], master: type[T]) -> T:
    """Compose, resolve and validate a configuration.

    Args:
        path: YAML file.
        overrides: ``a.b=c``, ``++a.b=c`` or ``~a.b``, applied in order.
        master: Class of the whole tree.

    Returns:
        The frozen tree.

    Raises:
        ConfigError: with all violations at once.
    """
    return build(compose(path, overrides), master, source=str(path))


def build[T: ConfigModel](tree: DictConfig, master: type[T], source: str = "") -> T:
    """Resolve and validate a composed tree; logs every performance hint that has no effect.

    Raises:
        ConfigError: with all violations at once.
    """
    data, problems = resolve(tree, master)
    config, more = validate(data, master)
    if problems or more or config is None:
        raise ConfigError([*problems, *more], source)
    for note in hints(config):
        logger.warning("%s", note)
    return config


def compose(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Give the tree of `path` and its parents with `overrides` applied; nothing is resolved yet.

    Raises:
        ConfigError: a file is missing, is not a mapping, or inherits from itself.
        OverridesError: an override does not parse or deletes what is not there.
    """
    tree = _load_file(Path(path), ())
    for override in overrides:
        apply_override(tree, override)
    return tree


def _load_file(path: Path, children: tuple[Path, ...]) -> DictConfig:
    path = path.resolve()
    if path in children:
        raise _file_error("defaults", f"{path} inherits from itself")
    if not path.is_file():
        asked_by = f" (asked for by defaults of {children[-1]})" if children else ""
        raise _file_error("--config", f"no such file: {path}{asked_by}")
    try:
        own = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise _file_error("--config", f"{path} is not valid YAML: {error}") from error
    if not isinstance(own, DictConfig):
        raise _file_error("--config", f"{path} must be a mapping of sections")
    parents = own.pop("defaults", None)
    if isinstance(parents, str):
        parents = [parents]
    tree = OmegaConf.create({})
    for parent in parents or []:
        tree = _merge(tree, _load_file(path.parent / str(parent), (*children, path)))
    return _merge(tree, own)


def _merge(base: DictConfig, top: DictConfig) -> DictConfig:
    _replace_overridden(base, top)
    merged = OmegaConf.merge(base, top)
    assert isinstance(merged, DictConfig)
    return merged


def _replace_overridden(base: DictConfig, top: DictConfig) -> None:
    """Drop from `base` what `top` replaces: a mapping with ``_override_: true``, a list by a mapping or the reverse."""
    for key in list(top):
        node, below = top._get_node(key), base._get_node(key) if key in base else None
        if isinstance(node, DictConfig) and not (
            node._is_none() or node._is_missing() or node._is_interpolation()
        ):
            if node.pop("_override_", False):
                base.pop(key, None)
            _replace_overridden(below if isinstance(below, DictConfig) else OmegaConf.create({}), node)
        if {type(node), type(below)} == {DictConfig, ListConfig}:
            base.pop(key, None)


def apply_override(tree: DictConfig, override: str) -> None:
    """Apply ``a.b=c``, ``++a.b=c`` or ``~a.b`` to `tree`, in place.

    Raises:
        OverridesError: it does not parse or deletes what is not there.
    """
    match = _OVERRIDE.match(override)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise OverridesError([Violation(override, "not an override; write key=value, ++key=value or ~key")])
    key = match["key"]
    try:
        if match["sign"] == "~":
            _delete(tree, key)
        else:
            value = OmegaConf.from_dotlist([f"value={match['value']}"])._get_node("value")
            below = _node_at(tree, key)
            merge = isinstance(value, DictConfig) and isinstance(below, DictConfig)
            if isinstance(value, DictConfig) and not (value._is_none() or value._is_missing()):
                merge = not value.pop("_override_", False) and merge
                _replace_overridden(below if merge else OmegaConf.create({}), value)
            OmegaConf.update(tree, key, value, merge=merge, force_add=True)
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, KeyError, IndexError) as error:
        raise OverridesError([Violation(key, f"cannot apply {override!r}: {error}")]) from error


def _node_at(tree: DictConfig, key: str) -> Any:
    """Give the unresolved node at a dotted key, or None."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, (DictConfig, ListConfig)) or node._is_none() or node._is_interpolation():
            return None
        node = (
            node._get_node(int(part) if part.isdigit() else 0)
            if isinstance(node, ListConfig)
            else node._get_node(part)
        )
    return node


def _delete(tree: DictConfig, key: str) -> None:
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        node = node[int(part)] if isinstance(node, ListConfig) else node[part]
    if isinstance(node, ListConfig):
        del node[int(last)]
    elif last in node:
        del node[last]
    else:
        raise KeyError(f"there is no key {key} to delete")


def register_omegaconf_resolvers() -> None:
    """Register the arithmetic resolvers of recipes: ``${mul:a,b}``, ``add``, ``div`` and ``max``."""
    OmegaConf.register_resolver("add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_resolver("mul", lambda *factors: math.prod(factors), replace=True)
    OmegaConf.register_resolver("div", _divide, replace=True)
    OmegaConf.register_resolver("max", lambda *terms: max(terms), replace=True)


def _divide(a: Any, b: Any) -> Any:
    exact = isinstance(a, int) and isinstance(b, int) and a % b == 0
    return a // b if exact else a / b


def resolve(tree: DictConfig, master: type[ConfigModel]) -> tuple[dict[str, Any], list[Violation]]:
    """Give the plain tree with interpolations resolved, and what could not be resolved (left out of the tree).

    Class defaults and derived defaults count as present for interpolation, but are not added to the result.
    """
    register_omegaconf_resolvers()
    raw = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(raw, dict)
    backdrop = OmegaConf.create(_defaults(master, raw))
    full = _merge(backdrop, tree)
    problems: list[Violation] = []
    data = _resolved(full, raw, "", problems)
    return data, problems


def _defaults(cls: type[ConfigModel], raw: Mapping[Any, Any]) -> dict[str, Any]:
    """Give the defaults of every section that `raw` may interpolate, derived ones as interpolations."""
    out: dict[str, Any] = {}
    for key, (_, info) in cls.documented_fields().items():
        section = section_class(cls, key)
        below = raw.get(key)
        if section is not None and (isinstance(below, Mapping) or info.annotation is section):
            out[key] = _defaults(section, below if isinstance(below, Mapping) else {})
        elif section is None and not info.is_required():
            out[key] = info.get_default(call_default_factory=True, validated_data={})
    for rule in cls.derived:
        if rule.equals is None:
            node, *keys = out, *rule.target.split(".")
            for part in keys[:-1]:
                node = node.get(part, {})
            node[keys[-1]] = (rule.template or "{}").format("${" + rule.source + "}")
    return out


def _resolved(node: Any, raw: Any, path: str, problems: list[Violation], outer: tuple[Any, ...] = ()) -> Any:
    """Give `node` resolved, as far as `raw`, its unresolved plain form, goes; `outer` are the sections around it."""
    if not isinstance(raw, (dict, list)):
        return node
    found: dict[Any, Any] = {}
    around = (*outer, node)
    for key, item in raw.items() if isinstance(raw, dict) else enumerate(raw):
        here = f"{path}.{key}" if path else str(key)
        if item == "???":
            problems.append(Violation(here, "is mandatory (???) and not set"))
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            problems.append(Violation(here, f"cannot be resolved: {str(error).strip().splitlines()[0]}"))
            continue
        if any(value is section for section in around):
            problems.append(Violation(here, f"cannot be resolved: {item} contains this key"))
            continue
        below = item if isinstance(item, (dict, list)) else _container(value)
        found[str(key)] = _resolved(value, below, here, problems, around)
    return found if isinstance(raw, dict) else list(found.values())


def _container(value: Any) -> Any:
    """Give the structure of a value that an interpolation pointed to."""
    is_container = isinstance(value, (DictConfig, ListConfig))
    return OmegaConf.to_container(value, resolve=False) if is_container else value


def _file_error(key: str, message: str) -> ConfigError:
    return ConfigError([Violation(key, message)])


__all__ = [
    "ConfigError",
    "OverridesError",
    "apply_override",
    "build",
    "compose",
    "fill_derived",
    "load",
    "register_omegaconf_resolvers",
    "resolve",
]
