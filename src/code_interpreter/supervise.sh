#!/bin/sh
# Run the server, and start it again whenever it ends: supervise.sh PYTHON. TERM ends both.
python=${1:?usage: supervise.sh PYTHON}
server=
stop() {
  trap '' TERM INT HUP
  [ -n "$server" ] && kill -TERM "$server" 2>/dev/null && wait "$server"
  exit 0
}
trap stop TERM INT HUP
# The directory of the package; Python finds it as the working directory.
cd "$(dirname "$0")/.." || exit 1
while :; do
  "$python" -m code_interpreter &
  server=$!
  wait "$server"
  echo "the code interpreter ended with status $?; it is started again" >&2
  server=
  # A server that cannot start must not keep a CPU busy. A signal ends the wait.
  sleep 0.5 &
  wait $!
done
