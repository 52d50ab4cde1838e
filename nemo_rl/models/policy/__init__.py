# SPDX-License-Identifier: Apache-2.0
"""The policy: the trained model and its coordinator. This module holds its (torch-free) config classes."""

from nemo_rl.models.policy.config import *  # noqa: F403
from nemo_rl.models.policy.config import __all__ as __all__
