# SPDX-License-Identifier: Apache-2.0
"""The base class of every config section, and the markers a field may carry.

A section is a frozen pydantic model that refuses unknown keys and also reads like a mapping, by its
documented keys (``cfg["_v2"]``), so that code written for plain dictionaries works on it. No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class NotYet:
    """Field marker: only the values in `allowed` work today.

    Attributes:
        allowed: Values that load.
        use: What the user can do instead, a short clause.
    """

    allowed: tuple[Any, ...]
    use: str

    def accepts(self, value: Any) -> bool:
        """Whether `value` is one of the allowed ones (``True`` is not ``1``)."""
        return any(type(value) is type(ok) and value == ok for ok in self.allowed)


@dataclass(frozen=True)
class Hint:
    """Field marker: a performance hint that changes no result and has no effect in this version.

    The loader says so for every hint that is set to something else than its default.
    """

    why: str


@dataclass(frozen=True)
class OptionOf:
    """Field marker: it only matters with `feature`, which is not supported yet; until then it is accepted and unused.

    Attributes:
        feature: Dotted key of the feature, as a user writes it.
    """

    feature: str


@dataclass(frozen=True)
class Derived:
    """A default that is the value of another key, as documented by an interpolation in the exemplars.

    Attributes:
        target: Dotted key, relative to the class that declares it.
        source: Dotted key the value comes from, relative to the same class.
        template: With it, the value is ``template.format(source value)``.
        equals: With it, the value is whether the source has this value.
    """

    target: str
    source: str
    template: str | None = None
    equals: str | None = None

    def value(self, source: Any) -> Any:
        """Give the target's default for this value of the source."""
        if self.equals is not None:
            return source == self.equals
        return self.template.format(source) if self.template else source


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a configuration.

    Attributes:
        key: Dotted key, relative to the section that reports it.
        message: What is wrong, and a value that works.
        reads: Further keys the check depends on, relative too; it is left out where one of them is broken itself.
    """

    key: str
    message: str
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


class ConfigModel(BaseModel):
    """A frozen, strict, mapping-like config section."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        populate_by_name=True,
        protected_namespaces=(),
        defer_build=True,
        allow_inf_nan=False,
    )

    derived: ClassVar[tuple[Derived, ...]] = ()
    gone: ClassVar[Mapping[str, str]] = {}
    """Keys of older recipes that the schema does not have, and what to write instead."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Let null stand for a section that is off, and fill in derived defaults."""
        if not isinstance(data, Mapping):
            return data
        nulls = [key for key, value in data.items() if value is None and _is_switch(cls, key)]
        if nulls:
            data = {key: value for key, value in data.items() if key not in nulls}
        return fill_derived(cls, data) if cls.derived else data

    @classmethod
    def coerce(cls, value: Self | Mapping[str, Any]) -> Self:
        """Give `value` as a model of this class.

        Raises:
            pydantic.ValidationError: a key is unknown or a value has the wrong type.
        """
        return value if isinstance(value, cls) else cls.model_validate(plain(value))

    def violations(self) -> Iterator[Violation]:
        """Give what does not fit together inside this section; the loader calls it for every enabled section."""
        return iter(())

    def checked(self, prefix: str) -> Self:
        """Give this section, or fail if it contradicts itself.

        Args:
            prefix: Dotted key of this section, for the message.

        Raises:
            ValueError: with every violation inside this section alone.
        """
        problems = [f"{prefix}.{violation}" for violation in self.violations()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def documented_fields(cls) -> dict[str, tuple[str, FieldInfo]]:
        """Give documented key -> (attribute name, field); they differ for keys with a leading underscore."""
        return _documented_fields(cls)

    def with_runtime(self, **facts: Any) -> Self:
        """Give a validated copy with `facts` (by attribute name or documented key) replaced."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        known = type(self).documented_fields()
        for key, value in facts.items():
            values[known[key][0] if key in known else key] = value
        return type(self).model_validate(values)

    def to_dict(self) -> dict[str, Any]:
        """Give plain nested dictionaries by documented key (YAML-ready)."""
        return self.model_dump(by_alias=True)

    def __getitem__(self, key: str) -> Any:
        """Read by documented key; KeyError names the section."""
        known = type(self).documented_fields()
        if key in known:
            return getattr(self, known[key][0])
        raise KeyError(f"{type(self).__name__} has no key {key!r}")

    def __contains__(self, key: object) -> bool:
        return key in type(self).documented_fields()

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        return iter(type(self).documented_fields())

    def __len__(self) -> int:
        return len(type(self).model_fields)

    def __bool__(self) -> bool:
        return True

    def keys(self) -> list[str]:
        """Documented keys, in declaration order."""
        return list(type(self).documented_fields())

    def values(self) -> list[Any]:
        """Values, in declaration order."""
        return [self[key] for key in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Documented key and value pairs, in declaration order."""
        return [(key, self[key]) for key in self.keys()]

    def get(self, key: str, default: Any = None) -> Any:
        """Read by documented key; `default` only where the key does not exist in the schema."""
        return self[key] if key in self else default  # noqa: SIM401


@functools.cache
def _documented_fields(cls: type[ConfigModel]) -> dict[str, tuple[str, FieldInfo]]:
    return {info.alias or name: (name, info) for name, info in cls.model_fields.items()}


def plain(value: Any) -> Any:
    """Give nested models and mappings as plain dictionaries by documented key."""
    if isinstance(value, ConfigModel):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def fill_derived(cls: type[ConfigModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Give a copy of `data` in which every missing `Derived` target holds its source's value.

    Sections that are absent are created; sections that are not mappings are left for validation to report.
    """
    out = {key: plain(item) for key, item in data.items()}
    for rule in cls.derived:
        found, value = _lookup(cls, out, rule.source.split("."))
        if found and value is not None:
            _set_missing(out, rule.target.split("."), rule.value(value))
    return out


def _lookup(cls: type[ConfigModel], data: Mapping[str, Any], path: list[str]) -> tuple[bool, Any]:
    key, *rest = path
    if key in data:
        item = data[key]
        if not rest:
            return True, item
        section = section_class(cls, key)
        return _lookup(section, item, rest) if section and isinstance(item, Mapping) else (False, None)
    info = cls.documented_fields()[key][1]
    if rest:
        section = section_class(cls, key)
        return _lookup(section, {}, rest) if section else (False, None)
    if info.is_required():
        return False, None
    return True, info.get_default(call_default_factory=True, validated_data={})


def _set_missing(data: dict[str, Any], path: list[str], value: Any) -> None:
    key, *rest = path
    if not rest:
        data.setdefault(key, value)
        return
    section = data.setdefault(key, {})
    if isinstance(section, dict):
        _set_missing(section, rest, value)


def _is_switch(cls: type[ConfigModel], key: str) -> bool:
    """Whether `key` is a section that is off unless it says ``enabled: true``."""
    known = _documented_fields(cls)
    section = known[key][1].annotation if key in known else None
    if not (isinstance(section, type) and issubclass(section, ConfigModel)):
        return False
    enabled = section.model_fields.get("enabled")
    return enabled is not None and enabled.default is False


def section_class(cls: type[ConfigModel], key: str) -> type[ConfigModel] | None:
    """Give the class of section `key` of `cls`, or None if `key` is a leaf (optional sections count)."""
    info = cls.documented_fields()[key][1]
    candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, ConfigModel)), None)


def marker[T](info: FieldInfo, kind: type[T]) -> T | None:
    """Give the field's marker of class `kind`, if it has one."""
    return next((item for item in info.metadata if isinstance(item, kind)), None)
