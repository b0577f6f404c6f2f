#!/usr/bin/env bash
# Generates the TypeScript code of the protos into the folder given (default: where it belongs).
set -euo pipefail
cd "$(dirname "$0")/.."
package=clients/splitserve-node
plugin=$package/node_modules/.bin/protoc-gen-es
[ -x "$plugin" ] || { echo 'the TypeScript code needs npm, and: make node'; exit 1; }
out=${1:-$package/src/gen}
python=${PYTHON:-python}
# Of Google's protos, those that errors are made of; protoc-gen-es brings google.protobuf itself.
googleapis=$("$python" -c 'import google.rpc; print(list(google.rpc.__path__)[0])')/../..
mkdir -p "$out"
"$python" -m grpc_tools.protoc -I protos -I "$googleapis" \
    --plugin="protoc-gen-es=$plugin" \
    --es_out="$out" --es_opt=target=ts,import_extension=js \
    splitserve/scheduler/v1/{scheduler,admin}.proto splitserve/executor/v1/executor.proto \
    google/rpc/{status,error_details}.proto
