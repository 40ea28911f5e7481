#!/usr/bin/env bash
# Puts a CUDA compiler where none is installed: without root, without a GPU, in any folder.
#
#   kernels/toolkit.sh FOLDER        makes it there (105 MB to download, 300 MB in place)
#   source FOLDER/activate           in each shell that builds with `--features cuda`
#
# The compiler is NVIDIA's own, from its Python wheels. The libraries that a program with the feature links against
# (libcuda, libcublas, ...) are stand-ins that only hold the names: every function in them answers
# CUDA_ERROR_STUB_LIBRARY, so a program started with them says that there is no driver. To run one on a GPU machine,
# start it with that machine's libraries.
set -euo pipefail

case "${1:-}" in
"" | -*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
folder=$(realpath -m "$1")
project=$(realpath "$(dirname "$0")/..")
for tool in python3 gcc cargo; do
    command -v "$tool" > /dev/null || { echo "kernels/toolkit.sh needs $tool"; exit 1; }
done
python3 -m pip --version > /dev/null || { echo "kernels/toolkit.sh needs pip for python3"; exit 1; }

# 13.0: a driver reads PTX of its own version and older, and 13.0 is the oldest of the 13 line.
wheels=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85
)

if [ -e "$folder/complete" ]; then
    echo "$folder already holds the toolkit"
    exit 0
fi
mkdir -p "$folder"
work=$(mktemp -d "$folder/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT

python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$work/wheels" "${wheels[@]}"
python3 - "$work" <<'PYTHON'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
for wheel in sorted((work / "wheels").glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(work / "unpacked")
PYTHON
cp -a "$work"/unpacked/nvidia/cu13/. "$folder/"
chmod +x "$folder"/bin/* "$folder"/nvvm/bin/*
ln -sfn lib "$folder/lib64"
ln -sf libcudart.so.13 "$folder/lib/libcudart.so"
ln -sf libnvvm.so.4 "$folder/lib/libnvvm.so"
[ ! -e "$folder/nvvm/lib64" ] || ln -sf libnvvm.so.4 "$folder/nvvm/lib64/libnvvm.so"

# The names that have to be there are those in cudarc's bindings.
bindings=$(cd "$project" && cargo metadata --format-version 1 --features cuda | python3 -c '
import json, pathlib, sys
packages = json.load(sys.stdin)["packages"]
print(next(pathlib.Path(p["manifest_path"]).parent for p in packages if p["name"] == "cudarc"))')
mkdir -p "$folder/lib/stubs"
stub() { # stub LIBRARY SONAME BINDINGS PREFIX
    grep -ohE "\b$4[A-Za-z0-9_]+" "$bindings/src/$3/sys/mod.rs" | sort -u \
        | sed 's/.*/int &(void){return 34;}/' > "$work/$1.c"
    gcc -w -fno-builtin -shared -fPIC "-Wl,-soname,$2" -o "$folder/lib/stubs/$2" "$work/$1.c"
    ln -sfn "$2" "$folder/lib/stubs/lib$1.so"
}
stub cuda libcuda.so.1 driver cu
stub cublas libcublas.so.13 cublas cublas
stub cublasLt libcublasLt.so.13 cublaslt cublasLt
stub curand libcurand.so.10 curand curand
stub nvrtc libnvrtc.so.13 nvrtc nvrtc

cat > "$folder/activate" <<ACTIVATE
export PATH="$folder/bin:\$PATH"
export CUDA_HOME="$folder" CUDA_PATH="$folder" CUDA_ROOT="$folder" CUDA_TOOLKIT_ROOT_DIR="$folder"
# What candle's own kernels are built for; ours are built for several at once (see kernels/build.rs).
export CUDA_COMPUTE_CAP="\${CUDA_COMPUTE_CAP:-80}"
# Only where there is no driver, to start the programs at all.
if ! python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2> /dev/null; then
    export LD_LIBRARY_PATH="$folder/lib/stubs:$folder/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
fi
ACTIVATE
touch "$folder/complete"
"$folder/bin/nvcc" --version | tail -n 2
echo "source $folder/activate"
