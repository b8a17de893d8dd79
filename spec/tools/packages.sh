#!/bin/sh
# Installs the Debian packages named on the command line that are missing; without the right to, says which command would.
missing=
for p in "$@"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as=sudo; else
  echo "missing Debian packages; install them with:  sudo apt-get install -y$missing" >&2
  exit 1
fi
echo "installing Debian packages:$missing"
export DEBIAN_FRONTEND=noninteractive
$as apt-get install -y -q $missing >/dev/null 2>&1 || { $as apt-get update -q >/dev/null && $as apt-get install -y -q $missing >/dev/null; } ||
  { echo "failed: apt-get install -y$missing" >&2; exit 1; }
