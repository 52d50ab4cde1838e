# SPDX-License-Identifier: Apache-2.0
"""An option that is accepted has an effect: every key is read by some code, or marked as one that is not yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_rl.algorithms.config import MASTER_CONFIGS
from nemo_rl.utils.config_explain import find_uses, names_read
from nemo_rl.utils.config_model import ConfigModel, Hint, NotYet, OptionOf, marker
from nemo_rl.utils.config_schema import branches

# Keys that other code does not read yet although nothing says so: empty it, and keep it empty.
UNREAD: set[str] = set()


def _effective(cls: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys (path, attribute) that claim to have an effect; what a Derived default reads counts as read."""
    sources = {f"{prefix}{rule.source}" for rule in cls.derived}
    for key, (name, info) in cls.documented_fields().items():
        path = f"{prefix}{key}"
        if any(marker(info, kind) for kind in (NotYet, Hint, OptionOf)) or path in sources:
            continue
        below = branches(info.annotation)
        inner = [section for section in (below.section, below.values, *below.items) if section]
        for section in inner:
            switch = section.documented_fields().get("enabled")
            if switch is None or marker(switch[1], NotYet) is None:
                yield from _effective(section, f"{path}.")
        if not inner:
            yield path, name


@pytest.mark.parametrize("algorithm", list(MASTER_CONFIGS))
def test_every_key_is_read_somewhere(algorithm):
    read = names_read()
    keys = dict(_effective(MASTER_CONFIGS[algorithm]))
    assert len(keys) > 80
    unread = {path for path, name in keys.items() if not {name, path.rsplit(".", 1)[-1]} & read}
    assert unread - UNREAD == set(), "these keys are accepted and do nothing"
    assert {path for path in UNREAD if path in keys} - unread == set(), (
        "these are read now; take them out of UNREAD"
    )


# Hints whose name other code has for something of its own.
HOMONYMS = {
    "policy.megatron_cfg.apply_rope_fusion",
    "policy.megatron_cfg.bias_activation_fusion",
    "policy.scheduler",
}


def test_a_hint_is_really_without_effect():
    """Once code reads a key that is marked as a hint, the mark is wrong."""
    read = names_read()

    def hinted(cls: type[ConfigModel], prefix: str = "") -> Iterator[tuple[str, str]]:
        for key, (name, info) in cls.documented_fields().items():
            if marker(info, Hint):
                yield f"{prefix}{key}", name
            below = branches(info.annotation)
            if below.section:
                yield from hinted(below.section, f"{prefix}{key}.")

    keys = dict(hinted(MASTER_CONFIGS["grpo"]))
    assert len(keys) > 20
    assert {path for path, name in keys.items() if name in read} - HOMONYMS == set()


def test_an_option_of_a_missing_feature_is_one_of_a_refused_key():
    """`OptionOf` is no way round: the feature it names is refused itself."""
    refused = set()

    def collect(cls: type[ConfigModel], prefix: str) -> None:
        for key, (_, info) in cls.documented_fields().items():
            if marker(info, NotYet):
                refused.add(f"{prefix}{key}")
            below = branches(info.annotation)
            if below.section:
                collect(below.section, f"{prefix}{key}.")

    def options(cls: type[ConfigModel]) -> Iterator[str]:
        for _, info in cls.documented_fields().values():
            option = marker(info, OptionOf)
            if option:
                yield option.feature.split("=")[0]
            below = branches(info.annotation)
            if below.section:
                yield from options(below.section)

    for master in MASTER_CONFIGS.values():
        collect(master, "")
        named = set(options(master))
        assert named
        assert named <= refused


def test_find_uses_puts_the_places_that_name_the_section_first():
    from nemo_rl.models.policy.megatron_config import MegatronOptimizerConfig

    uses = find_uses(MegatronOptimizerConfig, "adam_beta1", ["megatron_cfg", "optimizer"])
    assert uses
    assert uses[0].file.startswith("nemo_rl/models/megatron/")
    assert "adam_beta1" in uses[0].text
