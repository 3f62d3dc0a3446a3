# Shared by tools/demo and tools/test: finds a Python, makes the virtual environment, installs.
# Source it from bash; it defines functions and sets ROOT and VENV.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${AIR_HPC_VENV:-$ROOT/.venv}

say() { printf '\n== %s\n' "$*" >&2; }

fail() {
  printf 'error: %s\n' "$1" >&2
  if [[ -n ${2:-} ]]; then printf 'next:  %s\n' "$2" >&2; fi
  exit 1
}

# May this shell install Debian packages?
may_apt() { [[ $(id -u) == 0 ]] && command -v apt-get > /dev/null; }

# apt_install PACKAGE...: installs what is missing, where it may; else says what to install.
apt_install() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if [[ ${#missing[@]} == 0 ]]; then return 0; fi
  if ! may_apt; then
    printf 'not installed, and this shell may not install them: %s\n' "${missing[*]}" >&2
    return 1
  fi
  say "installing ${missing[*]}"
  apt-get -qq update > /dev/null && DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; }

# The system's Python comes first: every user of the machine may run it, which one that is
# installed in somebody's home is not.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" > /dev/null && is_new_enough "$candidate" \
      && "$candidate" -c 'import venv, ensurepip' 2> /dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# make_venv EXTRA[,EXTRA...]: the environment with the project in it, from constraints.txt.
make_venv() {
  local extras=$1 python stamp
  stamp="$VENV/.air_hpc-$(sha256sum "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | sha256sum | cut -c1-12)-$extras"
  if [[ -f $stamp ]]; then return 0; fi
  if is_new_enough /usr/bin/python3 && ! /usr/bin/python3 -c 'import ensurepip' 2> /dev/null; then
    if may_apt; then apt_install python3-venv || true; fi
  fi
  python=$(find_python) || fail "no Python 3.11 or newer with venv was found" \
    "apt-get install python3-venv, or set PYTHON to one"
  say "making $VENV with $("$python" --version)"
  [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"
  # TORCH_INDEX: an index that has the torch build to take, for example the CPU one.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    --constraint "$ROOT/constraints.txt" --editable "$ROOT[$extras]" \
    || fail "pip could not install the project" "read its words above"
  touch "$stamp"
}
