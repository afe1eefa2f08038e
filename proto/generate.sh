#!/usr/bin/env bash
# Regenerates the Python stubs beside the .proto files. Needs the `dev` extra.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
"$python" -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
  --mypy_out=quiet:proto proto/tandem_proto/v1/*.proto
