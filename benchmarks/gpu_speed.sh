#!/bin/sh
# Fine-tuning, decoding and grounding on one GPU, in one call: benchmarks/gpu_speed.sh [RESULTS.jsonl]
#
# From a checkout, offline, in under 4 minutes on an H200 by its sizes; nothing is downloaded, the models have random
# weights. Needs torch, transformers (5.20 or newer), peft with accelerate, numpy, pyarrow, safetensors and tqdm, and
# neither faiss nor deepspeed. For a machine whose transformers is older, put a wheel into build/wheels first
# (pip download --no-deps --dest build/wheels transformers) and take that folder along.
#
# Each result is a JSON line with the card's name, on the console and in the file (gpu_speed.jsonl). Without a GPU the same
# code runs in a tiny form, which says nothing about speed: so the tests run it.
#
# It has run on a CPU only so far; no figure from a GPU has been recorded.
set -eu
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="shared${PYTHONPATH:+:$PYTHONPATH}"
if [ -d build/wheels ]; then
    packages=$(mktemp -d)
    "${PYTHON:-python3}" -m pip install --quiet --no-deps --no-index --target "$packages" build/wheels/*.whl
    PYTHONPATH="$packages:$PYTHONPATH"
fi
exec "${PYTHON:-python3}" benchmarks/gpu_speed.py "${1:-gpu_speed.jsonl}"
