#!/usr/bin/env bash
# Fail when the stubs in wire/v1 are not those of proto/.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
proto/generate.sh "$fresh"
if ! diff -r --exclude=__init__.py --exclude=__pycache__ "$fresh/wire/v1" wire/v1; then
  echo "wire/v1 differs from proto/: run 'make proto' and commit the result" >&2
  exit 1
fi
