#!/usr/bin/env bash
# Installs what headless rendering needs beside pip's packages: the EGL and GL loaders, and Mesa behind them.
# With root on a Debian or Ubuntu it installs them; otherwise it prints the one line to run.
set -euo pipefail
packages="libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri"
[ "$(uname -s)" = Linux ] || exit 0

missing() {
  for library in libEGL.so.1 libGL.so.1; do
    ldconfig -p 2>/dev/null | grep -q "$library" || return 0
  done
  return 1
}

missing || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing $packages"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $packages >/dev/null
else
  echo "Headless rendering of MuJoCo environments needs system packages. Run:  sudo apt-get install -y $packages"
fi
