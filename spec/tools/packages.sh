#!/bin/sh
# Installs those of the named Debian packages that are missing; without the right to, it fails and
# says which command would.
command -v dpkg-query >/dev/null || exit 0 # another system: the compiler will say what it misses
native=$(dpkg --print-architecture)
present=$(dpkg-query -W -f '${db:Status-Status} ${Package}:${Architecture}\n' "$@" 2>/dev/null)
has() {
  case "
$present
" in *"
installed $1
"*) true ;; *) false ;; esac
}
missing=
for p in "$@"; do
  has "$p" || has "$p:$native" || has "$p:all" || missing="$missing $p"
done
[ "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then as=
elif sudo -n true 2>/dev/null; then as='sudo -n'
else
  echo "missing Debian packages; install them with:  sudo apt-get install -y$missing" >&2
  exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  $as env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >"$log" 2>&1
}
echo "  APT$missing"
ls /var/lib/apt/lists/*Packages* >/dev/null 2>&1 && install && exit 0
$as apt-get update -q >"$log" 2>&1 && install && exit 0
tail -n 20 "$log" >&2
echo "failed:  apt-get install -y$missing" >&2
exit 1
