#!/usr/bin/env bash
# All of Amazon Beauty, five ways to start the new rows of SmolLM2-135M, on one GPU and offline, with a study's tables.
#
# NOT YET RUN ON A GPU. Only --cpu-smoke has been run. The settings in gpu_results.py (one epoch of grounding, three of
# fine-tuning, batches of 128) were chosen by arithmetic to take under 5 minutes on one H200; no figure of it exists yet.
#
#   benchmarks/gpu_results.sh pack BEAUTY     on a machine with the packages and the files (BEAUTY/items.jsonl and
#                                             BEAUTY/sequences.jsonl): item vectors, Semantic IDs, yardsticks, weights
#                                             and the package transformers, as parts of at most 60 MiB in
#                                             build/gpu_results/parts
#   benchmarks/gpu_results.sh take            on the machine with the GPU, as often as parts arrive in that folder: puts
#                                             them aside in $PARTS (/tmp/sidgraft-parts unless set)
#   benchmarks/gpu_results.sh run OUT         there, with all parts: trains, judges, writes OUT/report.tar.gz (the page
#                                             and the tables) and OUT/run.log
#   benchmarks/gpu_results.sh --cpu-smoke     the three steps here, on a slice of other data with a two-layer model
#
# The machine with the GPU needs this checkout and, for $PYTHON (python3 unless set), pip, torch, accelerate, peft, pyarrow,
# scipy, jinja2 and matplotlib; no network. transformers comes with the parts: it must be 5.20 or newer. SmolLM2 comes from a 4-bit file (Q4_1 GGUF, dequantized), its
# weights rounded to bfloat16 for the way; it is trained in float32 with bfloat16 autocast, histories packed.
set -euo pipefail
cd "$(dirname "$0")/.."
PARTS=${PARTS:-/tmp/sidgraft-parts}
PYTHON=${PYTHON:-python3}
MADE=${MADE:-build/gpu_results}
export PYTHONPATH=$PWD/shared${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

pack() { # CATALOG INTERACTIONS [--smoke]
    rm -rf "$MADE"
    mkdir -p "$MADE/parts"
    "$PYTHON" benchmarks/gpu_results.py make "$MADE/inputs" "$@"
    if [ "${3:-}" != --smoke ]; then
        "$PYTHON" -m pip download --quiet --no-deps --dest "$MADE/inputs/wheels" \
            "transformers==$("$PYTHON" -c 'import transformers; print(transformers.__version__)')"
    fi
    tar -C "$MADE" -cf - inputs | split -b 60M -d - "$MADE/parts/part-"
    (cd "$MADE/parts" && sha256sum part-* >SHA256SUMS)
    ls -l "$MADE/parts"
}

take() {
    mkdir -p "$PARTS"
    mv "$MADE"/parts/* "$PARTS/"
    ls -l "$PARTS"
}

run() { # OUT [--smoke]
    (cd "$PARTS" && sha256sum --check --quiet SHA256SUMS) || { echo "gpu_results: a part is missing or damaged" >&2; exit 1; }
    local work out
    mkdir -p "$1"
    out=$(cd "$1" && pwd)
    work=$(mktemp -d)
    trap "rm -rf '$work'" EXIT
    cat "$PARTS"/part-* | tar -C "$work" -xf -
    if [ -d "$work/inputs/wheels" ]; then
        "$PYTHON" -m pip install --quiet --no-deps --no-index --target "$work/packages" "$work"/inputs/wheels/*.whl
        export PYTHONPATH=$work/packages:$PYTHONPATH
    fi
    "$PYTHON" benchmarks/gpu_results.py compare "$work/inputs" "$work/made" "${@:2}" 2>&1 | tee "$out/run.log"
    tar -C "$work/made" -czf "$out/report.tar.gz" report
}

case "${1:-}" in
pack) pack "${2:?BEAUTY, the folder with items.jsonl and sequences.jsonl}/items.jsonl" "$2/sequences.jsonl" ;;
take) take ;;
run) run "${2:?OUT, the folder to write to}" ;;
--cpu-smoke)
    PARTS=$(mktemp -d)
    pack sample:complete-journey sample:complete-journey --smoke
    take
    run "$MADE/smoke" --smoke
    rm -rf "$PARTS"
    ;;
*) sed -n '2,/^set /{/^set /!p}' "$0" >&2; exit 2 ;;
esac
