#!/usr/bin/env bash
# Make the gRPC stubs in wire/v1 from proto/. With a folder as argument, write them there instead.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
"${PYTHON:-python}" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/wire/v1/*.proto
