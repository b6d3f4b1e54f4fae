#!/bin/sh
# Installs third-party clients that some slow tests use into .clients/: litellm, langchain, openai-agents, instructor and
# pydantic-ai in environments of their own, and Anthropic's and Vercel's JavaScript clients if node and npm are installed.
# Takes about a minute, 600 MB and a network connection. Without these clients the tests are skipped.
set -eu
cd "$(dirname "$0")/.."

mkdir -p .clients
[ -x .clients/venv/bin/python ] || "${PYTHON:-python3}" -m venv .clients/venv
.clients/venv/bin/python -m pip --disable-pip-version-check install -q \
  'litellm>=1.106' 'langchain-openai>=1.7' 'langchain-anthropic>=1.7' 'openai-agents>=0.20'
# instructor needs an older openai than the others.
[ -x .clients/typed/bin/python ] || "${PYTHON:-python3}" -m venv .clients/typed
.clients/typed/bin/python -m pip --disable-pip-version-check install -q instructor 'pydantic-ai-slim[openai]'

if command -v npm >/dev/null && command -v node >/dev/null; then
  [ -e .clients/package.json ] || echo '{"private": true}' > .clients/package.json
  npm --prefix .clients install --no-audit --no-fund --silent '@anthropic-ai/sdk@^1.12' 'zod@^4' \
    ai @ai-sdk/openai-compatible
else
  echo "node or npm not found: the JavaScript clients were not installed." >&2
fi
