#!/usr/bin/env bash
# Parts of benchmarks/speed/gpu.py on a machine without a network that has torch, transformers, pytest and little else.
#
#   make gpu-wheels                                # here: the packages that such a machine lacks, build/gpu-wheels
#   bash benchmarks/gpu.sh tests tiles             # there: figures in $OUT/bench-gpu.json (runs/gpu without OUT), and gpu.log
#   bash benchmarks/gpu.sh --rehearse              # on a CPU: all parts with tiny sizes, kernels in Triton's interpreter
#
# A machine with ten minutes per command and thirty in all takes these calls; then `python -m tools.gpu_page FILE...` here:
#   PART_SECONDS=190 bash benchmarks/gpu.sh tests tiles ranks
#   PART_SECONDS=280 bash benchmarks/gpu.sh head learner
#   PART_SECONDS=190 bash benchmarks/gpu.sh engine profile gap
#   PART_SECONDS=190 bash benchmarks/gpu.sh packs weights runs
#
# PYTHON names the interpreter. A part gets PART_SECONDS (480): shortly before, the case that runs is stopped, and the JSON
# says so. One that fails stops no other, and the exit status is 1.
set -u
cd "$(dirname "$0")/.."
options=()
if [ "${1:-}" = --rehearse ]; then
  shift
  options=(--device cpu --quick)
  export TRITON_INTERPRET=1
fi
[ $# -gt 0 ] || set -- tests head tiles learner ranks engine profile gap packs runs weights
out=${OUT:-runs/gpu}
mkdir -p "$out"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ls build/gpu-wheels/*.whl >/dev/null || { echo "no build/gpu-wheels here: make gpu-wheels, and carry that folder" >&2; exit 2; }
"${PYTHON:=python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" build/gpu-wheels/*.whl || exit 2
export PYTHONPATH=$PWD/src:$PWD/packages/verifiers/src:$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PART_SECONDS=${PART_SECONDS:-480}
failed=()
for part; do
  echo "== $part"
  timeout -k 10 "$PART_SECONDS" "$PYTHON" -m benchmarks.speed.gpu --parts "$part" --output "$out/bench-gpu.json" \
    "${options[@]}" 2>&1 | tee -a "$out/gpu.log"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || failed+=("$part ($status)")
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
