# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: commit, date and GPU, for the raw files of docs/performance."""

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def commit() -> str:
    """Of this tree; in a bundle of scripts/gpu_bundle.sh, which has no git, of what it packed."""
    packed = ROOT / "COMMIT"
    if packed.exists():
        return packed.read_text().strip()
    return _output("git", "describe", "--always", "--dirty") or "unknown"


def origin(device: str = "") -> dict[str, str]:
    """`device` is its name where nvidia-smi is not here."""
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = gpus.partition("\n")[0].partition(", ")
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": f"{name}, driver {driver}" if name else device,
    }
