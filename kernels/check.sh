#!/bin/sh
# check [REPORT]: runs the kernels' specs on the GPUs of this machine, a part of them under compute-sanitizer where it
# is, then benchmarks, and writes one report; the last line says what failed. With MF_CUDA=emulate in the environment
# the same on emulated devices, benchmarks with small tensors. Needs CUDA's libraries, and nothing else of this machine.
here=$(cd "$(dirname "$0")" && pwd)
report=$(realpath "${1:-$here/report.txt}")
[ -d "$here/files" ] || tar -C "$here" -xzf "$here/files.tar.gz" || exit 1
here=$here/files
cd "$here" || exit 1
places="$here/lib"
for folder in $(printf '%s' "$LD_LIBRARY_PATH" | tr ':' ' ') /usr/local/cuda/lib64 /usr/local/cuda*/lib64 \
  /usr/local/cuda*/lib /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/local/nvidia/lib64 /usr/lib/wsl/lib; do
  [ -d "$folder" ] && places="$places:$folder"
done
loader=$(ls "$here"/lib/ld-linux-* | head -1)
export LUA_PATH="$here/lua/?.lua;$here/lua/?/init.lua;$here/?.lua;;" LUA_CPATH="$here/cpath/?.so;;"
run() { "$loader" --library-path "$places" "$here/bin/moonflow" "$@"; }

failed=''
: > "$report"
say() { printf '%s\n' "$*" | tee -a "$report"; }

# part NAME SECONDS COMMAND...: its output goes to the report, its failure to the list.
part() {
  name=$1 limit=$2
  shift 2
  say "== $name"
  begin=$(date +%s)
  ( "$@" & child=$!
    ( sleep "$limit"; kill "$child" ) 2>/dev/null & watch=$!
    wait "$child"; code=$?
    kill "$watch" 2>/dev/null
    exit "$code" ) > "$report.part" 2>&1
  code=$?
  tail -n 60 "$report.part" | tee -a "$report"
  [ "$code" -eq 0 ] || { failed="$failed $name"; say "== $name failed with code $code"; }
  say "== $name took $(($(date +%s) - begin)) s"
}

emulated=${MF_CUDA:-}
say "moonflow on $(uname -n), $(date -u '+%Y-%m-%d %H:%M') UTC"
[ -n "$emulated" ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv 2>&1 | tee -a "$report"
part devices 60 run -e "local mf = require 'moonflow'; print(mf.ones(2, { device = 'cuda' }) * 3)"
if [ -z "$failed" ]; then
  for spec in spec/cuda/*_spec.lua; do part "$spec" 150 run busted.lua --output=plainTerminal "$spec"; done
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  if [ -n "$sanitizer" ] && [ -z "$emulated" ]; then
    part compute-sanitizer 100 "$sanitizer" --error-exitcode 9 "$loader" --library-path "$places" \
      "$here/bin/moonflow" busted.lua --output=plainTerminal spec/cuda/large_spec.lua
  fi
  if [ -n "$emulated" ]; then
    part kernels 100 run examples/bench_cuda.lua --mib 1 --seconds 0.01
  else
    part kernels 60 run examples/bench_cuda.lua
    for dtype in fp32 bf16; do
      part "gpt2 $dtype" 60 run examples/bench.lua gpt2 --device cuda --mode graph --dtype $dtype --batch 32
      part "bert $dtype" 60 run examples/bench.lua bert --device cuda --mode graph --dtype $dtype --batch 64
      part "resnet50 $dtype" 60 run examples/bench.lua resnet50 --device cuda --mode graph --dtype $dtype --batch 128 \
        --channels-last
    done
  fi
fi
rm -f "$report.part"
if [ -n "$failed" ]; then say "FAILED:$failed"; exit 1; fi
say 'all passed'
