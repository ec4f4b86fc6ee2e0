#!/usr/bin/env bash
# install_torch.sh PYTHON [REQUIREMENT]: torch for this machine.
# With a requirement: that one, from pip's own sources. Without: torch >= 2.10; where no NVIDIA GPU is found, from
# PyTorch's public CPU index (0.2 GB instead of some 3 GB to fetch and 5 GB on disk), falling back to PyPI.
set -euo pipefail
python=$1
requirement=${2:-}
pip() { "$python" -m pip --disable-pip-version-check install --progress-bar off "$@"; }

if [ -n "$requirement" ]; then
    pip "$requirement"
elif nvidia-smi -L 2>/dev/null | grep -q GPU; then
    pip 'torch>=2.10'
else
    # Exactly that index: other indexes of this machine's pip settings may hold newer CUDA builds.
    (
        unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
        PIP_CONFIG_FILE=/dev/null pip --retries 1 --timeout 15 --index-url https://download.pytorch.org/whl/cpu 'torch>=2.10'
    ) || {
        echo "PyTorch's CPU index did not serve torch; taking it from PyPI (a larger build with CUDA)."
        free=$(($(df -Pk "$(dirname "$python")" | awk 'NR == 2 {print $4}') / 1048576))
        if [ "$free" -lt 9 ]; then  # 5.6 GB in the environment, 3 GB on their way there
            echo "install_torch: 9 GiB must be free for a build of torch with CUDA; got $free GiB. Fix: free some, or name a CPU build, TORCH=..." >&2
            exit 1
        fi
        pip 'torch>=2.10'
    }
fi
