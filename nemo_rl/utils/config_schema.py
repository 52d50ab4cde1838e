# SPDX-License-Identifier: Apache-2.0
"""Reflection over config classes: which sections an annotation may hold, and every key of a tree. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from nemo_rl.utils.config_model import ConfigModel


@dataclass(frozen=True)
class Branches:
    """The config classes that a field may hold.

    Attributes:
        section: The class of the field itself.
        items: Classes of list items.
        values: Class of the values of a mapping with free names.
    """

    section: type[ConfigModel] | None = None
    items: tuple[type[ConfigModel], ...] = ()
    values: type[ConfigModel] | None = None


def branches(annotation: Any) -> Branches:
    """Give the config classes that a field with this annotation may hold."""
    options = _options(annotation)
    section = next((option for option in options if _is_section(option)), None)
    items = [
        item for option in options if get_origin(option) is list for item in _options(get_args(option)[0])
    ]
    values = [
        item for option in options if get_origin(option) is dict for item in _options(get_args(option)[1])
    ]
    return Branches(
        section=section,
        items=tuple(item for item in items if _is_section(item)),
        values=next((value for value in values if _is_section(value)), None),
    )


@functools.cache
def schema_keys(cls: type[ConfigModel]) -> tuple[str, ...]:
    """Give every dotted key of a tree, sections included; ``*`` stands for a free name, list items have no key."""
    return tuple(_walk(cls, ""))


def _walk(cls: type[ConfigModel], prefix: str) -> Iterator[str]:
    for key, (_, info) in cls.documented_fields().items():
        path = f"{prefix}{key}"
        yield path
        below = branches(info.annotation)
        if below.section:
            yield from _walk(below.section, f"{path}.")
        if below.values:
            yield from _walk(below.values, f"{path}.*.")


def _options(annotation: Any) -> list[Any]:
    """Give the alternatives of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        return [option for arg in get_args(annotation) for option in _options(arg)]
    return [annotation]


def _is_section(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, ConfigModel)
