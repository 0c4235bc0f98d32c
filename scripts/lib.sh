# Functions of the scripts in this directory: find Python, create the virtual environment, install
# packages. They need Debian or Ubuntu, root, and Python 3.11 or newer.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${PADDOCK_CACHE:-/var/cache/paddock}
VENV=${PADDOCK_VENV:-$ROOT/.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }

# apt_install PACKAGE...: install the missing packages.
apt_install() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  command -v apt-get >/dev/null || die "missing packages: ${missing[*]}" "install them with your system's package manager"
  [ "$(id -u)" -eq 0 ] || die "missing packages: ${missing[*]}" "run once as root: apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null; } ||
    die "apt-get could not install ${missing[*]}" "run 'apt-get update' and read its output"
}

# find_python [VERSION]: print a Python of this version (3.11) or newer. Those of pyenv are tried too:
# its shims start only the versions that are switched on.
find_python() {
  local oldest=${1:-3.11} candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 \
    "${PYENV_ROOT:-${HOME:-/root}/.pyenv}"/versions/3.1[1-9]*/bin/python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < tuple(map(int, sys.argv[1].split("."))))' "$oldest" 2>/dev/null &&
      { echo "$candidate"; return; }
  done
  die "Python $oldest or newer was not found" "apt-get install python3"
}

# stamp_of LOCK: print a hash of everything that decides which packages are installed.
stamp_of() { cat "$ROOT/requirements/$1.txt" "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1; }

# make_venv LOCK: create a virtual environment with the packages of the lock file, and Paddock.
make_venv() {
  local lock=$1 stamp python
  python=$(find_python)
  if [ ! -x "$VENV/bin/python" ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv "$VENV"
  fi
  stamp=$(stamp_of "$lock")
  if [ "$(cat "$VENV/.paddock-$lock" 2>/dev/null)" != "$stamp" ]; then
    say "installing Python packages ($lock)"
    "$VENV/bin/pip" install -q --require-hashes -r "$ROOT/requirements/$lock.txt"
    "$VENV/bin/pip" install -q --no-deps --no-build-isolation -e "$ROOT" 2>/dev/null ||
      "$VENV/bin/pip" install -q --no-deps -e "$ROOT"
    echo "$stamp" > "$VENV/.paddock-$lock"
    # The packages of `dev` include those of `run`.
    [ "$lock" = run ] || stamp_of run > "$VENV/.paddock-run"
  fi
}

# own_temp: create $TEMP, a directory for the files of this test run; remove it if the tests pass.
# Every run cleans up the default directory of pytest, so concurrent runs would disturb each other.
own_temp() {
  # The path of a socket has at most 107 bytes, so TMPDIR must be short.
  [ "$(printf %s "${TMPDIR:-}" | wc -c)" -le 12 ] || export TMPDIR=/tmp
  TEMP=$(mktemp -d -t pdtest.XXXXXX)
  trap '[ $? -eq 0 ] && rm -rf --one-file-system "$TEMP" || say "the files of the tests are in $TEMP"' EXIT
}

# Install what sandboxes on this machine need: a C compiler for init, nftables, btrfs, debootstrap, CRIU.
install_runtime() {
  apt_install gcc libc6-dev iproute2 nftables btrfs-progs debootstrap ca-certificates zstd
  # Discard the path on stdout: the output of `up -o json` must be one line of JSON.
  "$ROOT/scripts/build-criu" >/dev/null || say "no working CRIU: sandboxes can be frozen, but not hibernated or forked"
}
