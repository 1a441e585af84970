#!/bin/sh
# Renew the hashed requirement locks. No index address is recorded in them.
set -eu
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install --quiet uv
lock() { .venv/bin/uv pip compile pyproject.toml "$@" --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet; }
lock --group build --output-file requirements/runtime.txt
lock --extra plot --constraint requirements/runtime.txt --output-file requirements/plot.txt
lock --group build --group dev --extra plot --constraint requirements/runtime.txt --output-file requirements/dev.txt
