#!/usr/bin/env bash
# Fails if the generated code is not what the protos say. PYTHON needs grpcio-tools (make protos).
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/generate_protos.sh "$fresh"
stale=0
while IFS= read -r file; do
    cmp -s "$fresh/$file" "protos/$file" || { echo "protos/$file is not current"; stale=1; }
done < <({ cd "$fresh" && find . -name '*_pb2*.py*'; cd "$OLDPWD/protos" && find . -name '*_pb2*.py' \
    -o -name '*_pb2*.pyi'; } | sort -u)
[ "$stale" -eq 0 ] || { echo 'run: make protos'; exit 1; }
echo 'the generated code is current'
