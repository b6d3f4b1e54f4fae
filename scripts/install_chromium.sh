#!/bin/sh
# Installs Debian's Chromium, which the tests of the web page use. Needs root; without Chromium those tests are skipped.
set -eu

if command -v chromium >/dev/null; then
  chromium --version
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "Run this as root, or ask an administrator to install the package 'chromium'." >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "This system has no apt-get; install Chromium with its package manager." >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
chromium --version
