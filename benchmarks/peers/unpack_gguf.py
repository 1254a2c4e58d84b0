"""A GGUF file's numbers as a folder in bfloat16 that other engines read, as transformers has them.

`PYTHON unpack_gguf.py FILE.gguf FOLDER`, with the Python of an environment that `setup.sh openvino`
has made. OpenVINO, vLLM and transformers then have the same model as engines that read the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write the checkpoint and its tokenizer."""
    file, target = Path(sys.argv[1]), sys.argv[2]
    named = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **named)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(str(file.parent), **named).save_pretrained(target)


if __name__ == "__main__":
    main()
