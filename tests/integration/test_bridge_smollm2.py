# SPDX-License-Identifier: Apache-2.0
"""A real pretrained model through the bridge; `scripts/fetch_smollm2.sh` makes it where it is not there yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_bridge import AutoBridge
from tests.support.models import hf_token_logprobs
from tests.support.world import run_world

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SENTENCES = """\
The river had been frozen since the first week of December.
She opened the letter, read it twice, and put it back without a word.
Water boils at one hundred degrees Celsius at sea level.
In 1969 two people walked on the Moon while a third one waited in orbit.
def add(a, b): return a + b
The committee will meet again on Thursday to discuss the budget.
My grandmother's recipe needs three eggs, a cup of flour and some patience.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
"Where were you?" he asked, although he already knew the answer.
The train to Lyon leaves at 7:45 from platform 12.
A prime number has exactly two divisors: one and itself.
It rained for so long that the children forgot what the garden looked like.
To be or not to be, that is the question.
Please send the signed contract to our office before the end of the month.
The price of coffee rose by 12.5% in the second quarter.
If x is 3 and y is 4, then the hypotenuse is 5.
Mount Everest is the highest mountain above sea level.
Nobody in the village could remember a winter as mild as this one.
The first computers filled whole rooms and had less memory than a postcard.
Thank you for your help; I could not have finished this without you.""".splitlines()


@pytest.fixture(scope="module", autouse=True)
def fetched() -> None:
    subprocess.run(["bash", str(ROOT / "scripts" / "fetch_smollm2.sh")], check=True, timeout=600)


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [torch.tensor(tokenizer(sentence)["input_ids"]) for sentence in SENTENCES]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


@pytest.fixture(scope="module")
def oracle(batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        return hf_token_logprobs(
            AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), *batch
        )


@pytest.mark.parametrize("tp", [1, 3])
def test_logprobs_equal_transformers(batch: tuple[Tensor, Tensor], oracle: Tensor, tp: int) -> None:
    input_ids, lengths = batch
    real = torch.arange(input_ids.shape[1])[None] < lengths[:, None]
    ranks = run_world(
        tp,
        "tests.integration.worlds_bridge:real_logprobs",
        path=str(MODEL),
        input_ids=input_ids,
        tp=tp,
        vocab=49152,
        deadline=240,
    )
    assert len(SENTENCES) == 20
    for logprobs in ranks:
        assert (logprobs - oracle)[real].abs().max() < 1e-4


def test_two_ranks_are_refused_with_sizes_that_work() -> None:
    provider = AutoBridge.from_hf_pretrained(MODEL).to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match=r"9 attention heads do not divide by 2.*Sizes that work: 1, 3$"):
        provider.finalize()
