#!/usr/bin/env bash
# Runs what kernels/pack.sh packed, on a machine with an NVIDIA GPU, CUDA's libraries and no Rust.
#
#   ./run.sh [WHAT] [RESULTS] [ARGUMENT...]
#
# WHAT is one of
#   tests      our kernels against the reference, and the golden numbers
#   examples   each packed example at toy size
#   bench      our times, to RESULTS/cuda.csv
#   sanitize   memcheck, initcheck, synccheck and racecheck of compute-sanitizer on small shapes
#   peers      the times of other people's kernels (of torch and triton, which must be there) and ours, taking turns, to
#              RESULTS/peers.csv
#   all        all of it, the default
# Logs go to the folder RESULTS (./results). ARGUMENTs go to the programs: names of tests, options of benches.
# It ends with 1 when anything failed.
set -uo pipefail

here=$(realpath "$(dirname "$0")")
what=${1:-all}
results=$(realpath -m "${2:-$here/results}")
shift $(($# < 2 ? $# : 2))
case "$what" in
tests | examples | bench | sanitize | peers | all) ;;
*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
if [ ! -e "$here/golden" ]; then
    echo "run.sh runs what kernels/pack.sh packed: unpack that, and start the run.sh in it"
    exit 2
fi
mkdir -p "$results"

# ---- Libraries: CUDA's own folder, what the system knows, and those that come with Python packages ----
folders=(/usr/local/cuda/lib64 /usr/local/cuda/targets/*/lib /usr/local/cuda-*/lib64)
python_folders() {
    python3 -c '
import glob, os, site, sys
for root in dict.fromkeys(site.getsitepackages() + [site.getusersitepackages()] + sys.path):
    for folder in sorted(glob.glob(os.path.join(root, "nvidia", "*", "lib"))):
        print(folder)' 2> /dev/null
}
mapfile -t -O ${#folders[@]} folders < <(python_folders)
programs=("$here"/*/cuda "$here"/*/golden "$here"/examples/*)
missing() { # the libraries that a program lacks
    for program in "${programs[@]}"; do
        [ ! -x "$program" ] || ldd "$program" | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p'
    done | sort -u
}
# The system's own come first: what they are enough for needs no other.
for library in $(missing); do
    for folder in "${folders[@]}"; do
        if [ -e "$folder/$library" ]; then
            case ":${LD_LIBRARY_PATH:-}:" in
            *":$folder:"*) ;;
            *) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder" ;;
            esac
            break
        fi
    done
done
still=$(missing)
if [ -n "$still" ]; then
    echo "run.sh: no folder known here has" $still
    echo "looked in: what ldconfig knows, ${folders[*]}; LD_LIBRARY_PATH can name more"
    exit 1
fi
{
    echo "version $(cat "$here/version" 2> /dev/null)"
    echo "LD_LIBRARY_PATH ${LD_LIBRARY_PATH:-}"
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
} > "$results/machine.txt" 2>&1
cat "$results/machine.txt"

# ---- Steps ----
failed=()
step() { # step NAME COMMAND...: its output is shown and kept in NAME.log
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    # Without a GPU programs skip everything and end well, but that is not what they are here for.
    if "$@" 2>&1 | tee "$results/$name.log" && ! grep -q "no CUDA device" "$results/$name.log"; then
        echo "-- $name: passed in $((SECONDS - started)) s"
    else
        echo "-- $name: FAILED in $((SECONDS - started)) s"
        failed+=("$name")
    fi
}
packed() { # says so where a program was left out of the package
    [ -x "$here/$1" ] || { echo "$1 is not packed" && failed+=("$1") && false; }
}

tests() {
    ! packed tests/cuda || step tests-cuda "$here/tests/cuda" "$@"
    ! packed tests/golden || GOLDEN_DIR=$here/golden step tests-golden "$here/tests/golden" --cuda "$@"
    for program in "$here"/unit_tests/*; do
        [ ! -x "$program" ] || step "unit-tests-$(basename "$program")" "$program" "$@"
    done
}

examples() {
    local model
    model=$(mktemp -d)
    if [ -x "$here/examples/train" ]; then
        step example-train "$here/examples/train" --toy --device cuda --out "$model/f32"
        step example-train-bf16 "$here/examples/train" --toy --device cuda --dtype bf16 --encoding rope
        [ ! -x "$here/examples/generate" ] || step example-generate "$here/examples/generate" --model "$model/f32" --device cuda
    fi
    for program in "$here"/examples/*; do
        local name toy=(--toy)
        name=$(basename "$program")
        case "$name" in
        train | generate) continue ;;
        custom_encoding) toy=() ;;
        esac
        [ ! -x "$program" ] || step "example-$name" "$program" "${toy[@]}" --device cuda
    done
    rm -rf "$model"
}

bench() {
    packed benches/cuda || return
    step bench "$here/benches/cuda" "$@" "$results/cuda.csv"
    [ ! -e "$results/cuda.csv" ] || cat "$results/cuda.csv"
}

sanitize() {
    local sanitizer tool
    sanitizer=$(command -v compute-sanitizer || ls -d /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -n 1)
    if [ -z "$sanitizer" ]; then
        echo "no compute-sanitizer here, neither in PATH nor in /usr/local/cuda*/bin"
        failed+=(sanitize)
        return
    fi
    packed tests/cuda || return
    # initcheck does not see what cuBLAS writes by TMA (products of bf16), and takes it for unwritten; so models are left out
    # of it. That all is written shows in the whole set of tests, which fills freed memory with NaN.
    local alone=(small_ rotate phase_norm tape_update rms_norm swiglu adamw token_losses_F)
    for tool in memcheck initcheck synccheck racecheck; do
        local names=("$@")
        [ "$tool" != initcheck ] || names=("${@:-${alone[@]}}")
        step "sanitize-$tool" "$sanitizer" --tool "$tool" --error-exitcode 9 "$here/tests/cuda" --small "${names[@]}"
        # It ends well where it finds nothing to look at.
        if ! grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards" "$results/sanitize-$tool.log"; then
            failed+=("sanitize-$tool: no clean summary")
        fi
    done
}

peers() {
    packed benches/cuda || return
    if [ ! -e "$here/peers/cuda_peers.py" ]; then
        echo "peers/cuda_peers.py is not packed"
        failed+=(peers)
        return
    fi
    step peers python3 "$here/peers/cuda_peers.py" --ours "$here/benches/cuda" --out "$results/peers.csv" "$@"
}

case "$what" in
all)
    for part in tests examples sanitize bench peers; do
        "$part"
    done
    ;;
*) "$what" "$@" ;;
esac

echo
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed; logs in $results"
