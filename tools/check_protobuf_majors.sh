#!/usr/bin/env bash
# The generated code has to run under protobuf 6 (in .tools/protoc) and 7 (in .venv), and both have
# to write the same bytes. Each fills every message of every proto, and each reads what the other
# wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
six=${PROTOBUF_6_PYTHON:-.tools/protoc/bin/python}
seven=${PROTOBUF_7_PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$six" tools/protobuf_round_trip.py --major 6 --write "$folder/6"
"$seven" tools/protobuf_round_trip.py --write "$folder/7"
"$six" tools/protobuf_round_trip.py --read "$folder/7"
"$seven" tools/protobuf_round_trip.py --read "$folder/6"
cmp "$folder/6" "$folder/7"
