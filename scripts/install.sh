#!/usr/bin/env bash
# Installs Deft into a virtual environment, with uv if it is there and with pip otherwise; reuses what is installed.
#   scripts/install.sh PYTHON VENV [EXTRA]      EXTRA: such as dev; without one, only what training needs
set -euo pipefail
python=$1 venv=$2 extra=${3:-}
torch="torch==2.13.0" # first, so that the resolver of the rest meets a torch that is installed
package=".${extra:+[$extra]}"
SECONDS=0

step() { echo "[$1/3] $2 (${SECONDS} s)"; }
# Modules are compiled when they are first imported, not all of them now: that would take a minute on two cores. Where
# Python must not write what it compiles, every command would compile PyTorch again, which takes ten seconds.
pip_compiles=--no-compile uv_compiles=
if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
  echo "PYTHONDONTWRITEBYTECODE is set: modules are compiled now, for about a minute"
  pip_compiles=--compile uv_compiles=--compile-bytecode
fi
with_pip() { "$venv/bin/python" -m pip install --disable-pip-version-check "$pip_compiles" "$@"; }
with_uv() { uv pip install --python "$venv/bin/python" ${uv_compiles:+"$uv_compiles"} "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Deft needs Python 3.11 or newer: make PYTHON=python3.11 …" >&2
  exit 1
}
step 1 "Python $("$python" -c 'import platform; print(platform.python_version())') in $venv"
test -x "$venv/bin/python" || "$python" -m venv "$venv"

install=with_pip
if command -v uv >/dev/null; then
  install=with_uv
  step 2 "$torch, with uv"
  if ! with_uv --torch-backend=auto "$torch"; then
    echo "uv could not install $torch (its message is above): pip installs it, and everything else"
    install=with_pip
  fi
fi
if [ $install = with_pip ]; then
  step 2 "$torch, with pip"
  with_pip "$torch"
fi
step 3 "Deft and its dependencies${extra:+ with the extra $extra}, with ${install#with_}"
$install --editable "$package"
if [ "$pip_compiles" = --compile ]; then "$venv/bin/python" -m compileall -q deft; fi
echo "Installed in ${SECONDS} s"
