#!/usr/bin/env bash
# Builds what runs on a GPU and packs it for a machine that has one and no Rust.
#
#   kernels/pack.sh FILE.tar.xz [CARGO_TARGET...]
#
# CARGO_TARGETs are those of `cargo build`, and --lib for the library's unit tests; by default
#   --lib --test cuda --test golden --bench cuda --example train --example generate
# On the other machine: tar xf FILE.tar.xz && candle-posenc-gpu/run.sh
#
# Building needs nvcc, or `source FOLDER/activate` of what kernels/toolkit.sh made in FOLDER.
set -euo pipefail

case "${1:-}" in
"" | -*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
file=$(realpath -m "$1")
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(--lib --test cuda --test golden --bench cuda --example train --example generate)
most=$((60 * 1000 * 1000))
cd "$(dirname "$0")/.."
for tool in cargo python3 strip tar xz; do
    command -v "$tool" > /dev/null || { echo "kernels/pack.sh needs $tool"; exit 1; }
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packed=$work/candle-posenc-gpu
mkdir -p "$packed"

# Cargo tells one message a line; what it tells people goes to standard error.
cargo build --release --features cuda --message-format=json-render-diagnostics "${targets[@]}" > "$work/messages"
case " ${targets[*]} " in
*" --lib "*) cargo test --no-run --release --features cuda --message-format=json-render-diagnostics --lib >> "$work/messages" ;;
esac
python3 - "$work/messages" > "$work/made" <<'PYTHON'
import json, sys
for line in open(sys.argv[1]):
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["executable"]:
        target = message["target"]
        kind = {"test": "tests", "bench": "benches", "example": "examples"}.get(target["kind"][0], "unit_tests")
        print(kind, target["name"], message["executable"], sep="\t")
    elif message["reason"] == "build-script-executed" and "candle-posenc" in message["package_id"]:
        print("resources", "-", message["out_dir"] + "/resources.txt", sep="\t")
PYTHON
while IFS=$'\t' read -r kind name made; do
    if [ "$kind" = resources ]; then
        cp "$made" "$packed/resources.txt"
    else
        mkdir -p "$packed/$kind"
        strip -o "$packed/$kind/$name" "$made"
        echo "$kind/$name ($(stat -c %s "$packed/$kind/$name") bytes)"
    fi
done < "$work/made"

cp kernels/run.sh "$packed/"
cp -r tests/golden "$packed/golden"
# More numbers of the same kind, where they lie beside the checkout.
[ ! -d ../shared/golden ] || cp -rn ../shared/golden/. "$packed/golden/"
mkdir -p "$packed/peers"
find benches/peers -name '*.py' -exec cp {} "$packed/peers/" \;
git describe --always --dirty > "$packed/version" 2> /dev/null || true
numbers=$(cd "$packed/golden" && find . -type f | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-16)
echo "golden numbers: $(find "$packed/golden" -type f | wc -l) files, sha256 $numbers" >> "$packed/version"

# The programs are nearly the same, 40 MB each: a dictionary that spans two finds each part but once.
mkdir -p "$(dirname "$file")"
tar -C "$work" --sort=name --owner=0 --group=0 -c candle-posenc-gpu \
    | xz -T1 --lzma2=preset=1,dict=128MiB > "$work/packed.tar.xz"
size=$(stat -c %s "$work/packed.tar.xz")
echo "$file: $size bytes"
if [ "$size" -gt "$most" ]; then
    echo "that is more than $most; name fewer CARGO_TARGETs"
    exit 1
fi
mv "$work/packed.tar.xz" "$file"
