# SPDX-License-Identifier: Apache-2.0
"""Says what a config key means and where it is read, from the classes and the source. Torch-free."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.utils.config_model import ConfigModel, Hint, NotYet, OptionOf, marker
from nemo_rl.utils.config_schema import branches, schema_keys
from nemo_rl.utils.config_validate import closest

_MAX_USES = 8


@dataclass(frozen=True)
class Use:
    """One place that reads a key.

    Attributes:
        file: Path relative to the folder of the packages.
        line: Line number.
        text: The source line.
        sure: Whether the expression or the file names the key's section; else only the last part of the key matches.
    """

    file: str
    line: int
    text: str
    sure: bool


def explain(key: str, masters: Sequence[type[ConfigModel]]) -> tuple[str, bool]:
    """Describe a key.

    Args:
        key: Dotted key, or the last part of one.
        masters: Trees to look in, in order.

    Returns:
        The text, and whether the key exists.
    """
    for master in masters:
        if _find(key, master):
            return _describe(key, master), True
    every = list(dict.fromkeys(k for master in masters for k in schema_keys(master)))
    same = [k for k in every if k.endswith(f".{key}")]
    if len(same) == 1:
        return explain(same[0], masters)
    if same:
        return f"{key} is the last part of several keys:\n" + "\n".join(f"  {k}" for k in same), True
    near = closest(key, every) or [
        k for k in every if k.rsplit(".", 1)[-1] in closest(key.rsplit(".", 1)[-1], _leaves(every))
    ]
    return f"unknown key {key}" + (f"; did you mean {' or '.join(near[:3])}?" if near else ""), False


def _leaves(keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(key.rsplit(".", 1)[-1] for key in keys))


def _find(key: str, master: type[ConfigModel]) -> list[tuple[type[ConfigModel], str]]:
    """Give the (section class, key) steps of a dotted key without its free names; empty if there is no such key."""
    steps: list[tuple[type[ConfigModel], str]] = []
    section: type[ConfigModel] | None = master
    free: type[ConfigModel] | None = None
    for part in key.split("."):
        if free is not None:
            section, free = free, None
            continue
        if section is None or part not in section.documented_fields():
            return []
        steps.append((section, part))
        below = branches(section.documented_fields()[part][1].annotation)
        section, free = below.section or next(iter(below.items), None), below.values
    return steps


def _describe(key: str, master: type[ConfigModel]) -> str:
    steps = _find(key, master)
    section, leaf = steps[-1]
    info = section.documented_fields()[leaf][1]
    lines = [key, f"  {info.description}", f"  type     {type_name(info.annotation)}{_limits(info.metadata)}"]
    below = branches(info.annotation)
    inner = below.section or below.values or next(iter(below.items), None)
    if inner is None:
        lines.append(f"  default  {_default(info)}{_derived_from(key, steps, master)}")
    for label, text in _status(info):
        lines.append(f"  {label:<8} {text}")
    if inner is not None:
        lines.append("  keys:")
        width = max(len(name) for name in inner.documented_fields())
        lines += [
            f"    {name:<{width}}  {field.description}"
            for name, (_, field) in inner.documented_fields().items()
        ]
        return "\n".join(lines)
    return "\n".join(lines + _use_lines(find_uses(section, leaf, [part for _, part in steps[:-1]])))


def _use_lines(uses: list[Use]) -> list[str]:
    shown = [use for use in uses if use.sure] or uses
    label = "used in" if shown and shown[0].sure else "perhaps used in"
    if not shown:
        return ["  used in  nothing reads this key"]
    lines = [f"  {label}"] + [f"    {use.file}:{use.line}  {use.text}" for use in shown[:_MAX_USES]]
    return lines + ([f"    and {len(shown) - _MAX_USES} more places"] if len(shown) > _MAX_USES else [])


def _status(info: Any) -> Iterator[tuple[str, str]]:
    limit, hint, option = marker(info, NotYet), marker(info, Hint), marker(info, OptionOf)
    if limit is not None:
        yield "status", f"not supported yet, except {', '.join(map(_shown, limit.allowed))}; use {limit.use}"
    if hint is not None:
        yield "status", f"performance hint without effect in this version: {hint.why}"
    if option is not None:
        yield "status", f"only matters with {option.feature}, which is not supported yet"


def _default(info: Any) -> str:
    if info.is_required():
        return "none, it must be set"
    return _shown(info.get_default(call_default_factory=True, validated_data={}))


def _derived_from(key: str, steps: list[tuple[type[ConfigModel], str]], master: type[ConfigModel]) -> str:
    """Say which key a default follows."""
    parts = key.split(".")
    for depth, (section, _) in enumerate(steps):
        prefix = parts[: depth if "*" not in parts else 0]
        for rule in section.derived:
            if [*prefix, *rule.target.split(".")] == parts:
                source = ".".join([*prefix, rule.source])
                if rule.equals is not None:
                    return f" (if left out: whether {source} is {rule.equals})"
                return f" (if left out: {(rule.template or '{}').format('${' + source + '}')})"
    return ""


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)


def type_name(annotation: Any) -> str:
    """Give a type as a user writes it in YAML."""
    text = (
        annotation.__name__
        if isinstance(annotation, type) and not hasattr(annotation, "__args__")
        else str(annotation)
    )
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", "").replace(", ", " | "), text)
    return text.replace("NoneType", "null").replace("None", "null")


def _limits(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f"{sign} {getattr(item, name)}"
        for item in metadata
        for name, sign in signs.items()
        if hasattr(item, name)
    ]
    return f" ({', '.join(limits)})" if limits else ""


def find_uses(section: type[ConfigModel], key: str, parents: Sequence[str]) -> list[Use]:
    """Give the places in the packages that read `key` as an attribute or a subscript, the sure ones first.

    Config classes themselves are left out.
    """
    name = section.documented_fields()[key][0]
    wanted, context = {key, name}, {section.__name__, *parents[-1:]}
    found: list[Use] = []
    for root, path in _sources():
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in wanted):
            continue
        names_section = any(re.search(rf"\b{re.escape(word)}\b", text) for word in context)
        lines = text.splitlines()
        found.extend(
            Use(str(path.relative_to(root)), line, lines[line - 1].strip(), names_section)
            for line in _reads(text, wanted)
        )
    return sorted(found, key=lambda use: not use.sure)


@functools.cache
def names_read() -> frozenset[str]:
    """Give every attribute and every string constant that the packages outside their config classes mention."""
    found: set[str] = set()
    for _, path in _sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


def _sources() -> Iterator[tuple[Path, Path]]:
    root = Path(__file__).resolve().parents[2]
    for package in ("nemo_rl", "megatron_bridge"):
        for path in sorted((root / package).rglob("*.py")):
            if not path.stem.endswith("config") and not path.stem.startswith("config"):
                yield root, path


def _reads(text: str, wanted: set[str]) -> list[int]:
    """Give the lines that read an attribute or a subscript of one of these names."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            read = isinstance(node.ctx, ast.Load) and node.attr in wanted
        elif isinstance(node, ast.Subscript):
            read = isinstance(node.slice, ast.Constant) and node.slice.value in wanted
        else:
            continue
        if read:
            lines.add(node.lineno)
    return sorted(lines)
