#!/bin/sh
# Installs Debian's Chromium, which the tests of the page drive. Needs root; without it those tests are skipped.
set -eu

if command -v chromium >/dev/null; then
  chromium --version
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "Run this as root, or have somebody install the package 'chromium'." >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "This system has no apt-get; install Chromium its own way." >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
chromium --version
