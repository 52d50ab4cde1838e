# SPDX-License-Identifier: Apache-2.0
"""Which environment variables reach Ray and its workers: an allow-list, never the driver's whole environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# What a process needs to run on a host; only a local Ray of our own gets these from the driver.
# fmt: off
_HOST_NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
    "LD_LIBRARY_PATH", "LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "XDG_CACHE_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CUDA_VISIBLE_DEVICES",
})
_HOST_PREFIXES = ("LC_", "NVIDIA_", "RAY_")
_OTHER_CLUSTER = frozenset({"RAY_ADDRESS", "RAY_RUNTIME_ENV_HOOK"})
# Settings of libraries: these also reach the workers of a cluster that somebody else started.
_SETTING_PREFIXES = (
    "NRL_", "NCCL_", "GLOO_", "UCX_", "FI_", "NVTE_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_",
    "TRITON_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "CUBLAS_",
    "CUDNN_", "CUDA_", "PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED",
)
# fmt: on
# A name that says that its value is a secret is never taken by prefix.
_SECRET = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|\w*KEYS?|AUTH)(_|$)", re.IGNORECASE
)
PASS_VARIABLE = "NRL_PASS_ENV"  # comma-separated names that the user lets through on top


def host_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that a Ray started by this driver, and so every worker, gets."""
    source = os.environ if environ is None else environ
    host = {name: source[name] for name in source if name in _HOST_NAMES or _matches(name, _HOST_PREFIXES)}
    for name in _OTHER_CLUSTER & host.keys():
        del host[name]
    return host | setting_environment(source)


def setting_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that the driver hands to workers wherever they run: library settings, no host facts."""
    source = os.environ if environ is None else environ
    explicit = {name.strip() for name in source.get(PASS_VARIABLE, "").split(",")}
    return {
        name: source[name]
        for name in source
        if name in explicit or (name not in _HOST_NAMES and _matches(name, _SETTING_PREFIXES))
    }


def _matches(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) and not _SECRET.search(name)
