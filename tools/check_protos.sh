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
if [ -x clients/splitserve-node/node_modules/.bin/protoc-gen-es ]; then
    tools/generate_node_protos.sh "$fresh/node"
    diff -rq "$fresh/node" clients/splitserve-node/src/gen || stale=1
else
    echo 'skipped: the TypeScript code (make node)'
fi
[ "$stale" -eq 0 ] || { echo 'run: make protos'; exit 1; }
echo 'the generated code is current'
