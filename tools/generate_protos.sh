#!/usr/bin/env bash
# Generates the Python code of the protos into the folder given (default: protos, beside them).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-protos}
mapfile -t files < <(find protos -name '*.proto' | sort)
"${PYTHON:-python}" -m grpc_tools.protoc -I protos \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" "${files[@]}"
