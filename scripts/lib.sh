# Shared by the scripts beside it: finds Python, makes the virtual environment, installs packages.
# Nothing is assumed but a Debian or Ubuntu machine, root, and Python 3.11 or newer.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${PADDOCK_CACHE:-/var/cache/paddock}
VENV=${PADDOCK_VENV:-$ROOT/.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n\nhint: %s\n' "$1" "$2" >&2; exit 1; }

# apt_install PACKAGE...: installs those that are missing; does nothing where all are there.
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
    die "apt-get could not install ${missing[*]}" "run 'apt-get update' and look at its messages"
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
  done
  die "Python 3.11 or newer was not found" "apt-get install python3"
}

# make_venv LOCK: an environment that holds just what the lock file pins, and Paddock itself.
make_venv() {
  local lock=$1 stamp python
  python=$(find_python)
  if [ ! -x "$VENV/bin/python" ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      apt_install "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv "$VENV"
  fi
  stamp=$(cat "$ROOT/requirements/$lock.txt" "$ROOT/pyproject.toml" | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$VENV/.paddock-$lock" 2>/dev/null)" != "$stamp" ]; then
    say "installing Python packages ($lock)"
    "$VENV/bin/pip" install -q --require-hashes -r "$ROOT/requirements/$lock.txt"
    "$VENV/bin/pip" install -q --no-deps --no-build-isolation -e "$ROOT" 2>/dev/null ||
      "$VENV/bin/pip" install -q --no-deps -e "$ROOT"
    echo "$stamp" > "$VENV/.paddock-$lock"
  fi
}

# own_temp: $TEMP, a directory for the files of this run's tests, removed when they pass. pytest's usual
# place is tidied up by every run, and one would fail for what another left there.
own_temp() {
  # A long TMPDIR would leave too little of the 107 bytes that a socket's path may have.
  [ "$(printf %s "${TMPDIR:-}" | wc -c)" -le 12 ] || export TMPDIR=/tmp
  TEMP=$(mktemp -d -t pdtest.XXXXXX)
  trap '[ $? -eq 0 ] && rm -rf --one-file-system "$TEMP" || say "files of the tests are kept in $TEMP"' EXIT
}

# What sandboxes on this machine need: a C compiler for pid 1, the firewall, snapshots, the base image.
install_runtime() {
  apt_install gcc libc6-dev iproute2 nftables btrfs-progs debootstrap ca-certificates
  # Its standard output is for whoever asks for the path: that of `up -o json` is one line of JSON.
  "$ROOT/scripts/build-criu" >/dev/null || say "no working CRIU: sandboxes can be frozen, not hibernated or forked"
}
