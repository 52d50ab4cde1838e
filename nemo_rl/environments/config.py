# SPDX-License-Identifier: Apache-2.0
"""Config of environments: the `env` section, one mapping per environment name. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl.utils.config_model import ConfigModel, NotYet


class MathEnvConfig(ConfigModel):
    """`env.math`: rewards by comparing answers with math-verify."""

    num_workers: int = Field(2, ge=1, description="Verifier processes.")
    stop_strings: list[str] | None = Field(None, description="Texts that end a response in this environment.")
    verifier_type: Annotated[
        Literal["math", "exact", "last_number", "english_multichoice", "multilingual_multichoice"],
        NotYet(("math", "exact", "last_number"), "math"),
    ] = Field(
        "math",
        description="`math` compares mathematics; `exact` compares the text, `last_number` the last number in it: "
        "both in the driver and fast, and neither takes a restated problem for its answer.",
    )
    math_verify_impl: Annotated[
        Literal["hf_math_verify", "dapo_math_verify"], NotYet(("hf_math_verify",), "hf_math_verify")
    ] = Field("hf_math_verify", description="Verifier.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds a verification may take; then the row is left out and counted as an error.",
    )
