#!/bin/sh
# What `run_pd.sh code` asks of a machine that has no code yet: code.sh VERB PATH [ARGUMENT …]; PATH is hosts.path.
# It is sent as the text of `sh -c`, so that standard input is free. Nothing outside of PATH/releases is ever removed.
# POSIX, with GNU coreutils, findutils, flock and rsync. Exit status: 0 done, 1 failed and said why.
set -u
LC_ALL=C
export LC_ALL

verb=$1
path=$2
releases=$path/releases
incoming=$releases/.incoming

fail() {
  echo "$*" >&2
  exit 1
}

# Keep others out until standard input closes, at most an hour; say so once it is done.
hold() {
  exec 9>"$releases/.lock" || fail "$releases/.lock cannot be opened"
  flock -n 9 || fail "another run_pd.sh code is at work in $path"
  rm -rf -- "$incoming" || fail "$incoming, which an interrupted copy left, cannot be removed"
  echo held
  timeout 3600 cat >/dev/null
}

# Make the folders; tell the current release, free KiB there and whether the wanted one is there.
prepare() {
  for tool in rsync flock sha256sum find df cmp timeout readlink; do
    command -v "$tool" >/dev/null || fail "$tool is missing on this machine; install it"
  done
  mkdir -p -- "$releases" || exit 1
  [ ! -L "$releases" ] || fail "$releases is a link; it must be a folder of its own"
  [ -w "$releases" ] || fail "$releases cannot be written to by $(id -un)"
  current=
  if [ -L "$path/current" ]; then
    current=$(readlink "$path/current")
    case ${current#releases/} in
      *[!0-9a-f]*) fail "$path/current leads to $current, which is no release; it was not made by run_pd.sh" ;;
    esac
    current=${current#releases/}
  elif [ -e "$path/current" ]; then
    fail "$path/current is not a link; it was not made by run_pd.sh"
  fi
  echo "current=$current"
  echo "free_kib=$(free_kib)"
}

free_kib() {
  df -Pk "$releases" | awk 'NR == 2 { print $4 }'
}

free() {
  echo "free_kib=$(free_kib)"
}

# Compare a folder with the manifest on standard input: each file, nothing else, and what may be executed.
compare() {
  cd -- "$1" || exit 1
  sed -n 's/^[FX] //p' "$2" | sha256sum --check --quiet --strict >"$2.wrong" 2>&1 \
    || fail "$1: $(grep -v WARNING "$2.wrong" | head -n 3 | tr '\n' ' ')"
  sed 's/^\([FX]\) [0-9a-f]*  /\1 /' "$2" | sort >"$2.told"
  listing | sort >"$2.found"
  cmp -s "$2.told" "$2.found" \
    || fail "$1: more or fewer files, or other modes: $(diff "$2.told" "$2.found" | grep '^[<>]' | head -n 3 | tr '\n' ' ')"
}

listing() {
  find . \( -name .venv -o -name __pycache__ -o -name '*.egg-info' -o -path ./.release \) -prune -o -type l -print \
    | while read -r link; do printf 'L %s -> %s\n' "$link" "$(readlink "$link")"; done
  find . \( -name .venv -o -name __pycache__ -o -name '*.egg-info' -o -path ./.release \) -prune \
    -o -type f -perm -0100 -print | sed 's/^/X /'
  find . \( -name .venv -o -name __pycache__ -o -name '*.egg-info' -o -path ./.release \) -prune \
    -o -type f ! -perm -0100 -print | sed 's/^/F /'
}

# with_manifest FOLDER SHA256: compare FOLDER with standard input, which must be whole.
with_manifest() {
  work=$(mktemp -d) || exit 1
  trap 'rm -rf -- "$work"' EXIT
  cat >"$work/manifest" || fail "no room for the manifest in $work"
  [ "$(sha256sum <"$work/manifest" | cut -d ' ' -f 1)" = "$2" ] || fail "the manifest arrived damaged"
  (compare "$1" "$work/manifest") || exit 1
}

# Whether a run record names the release.
in_use() {
  grep -qsF "releases/$1" "$path"/run/*/state.json
}

# has DIGEST SHA256: whether that release is there, whole.
has() {
  if [ ! -d "$releases/$3" ]; then
    echo "has=no"
  elif (with_manifest "$releases/$3" "$4"); then
    echo "has=yes"
  else
    echo "has=damaged"
  fi
}

# place DIGEST SHA256: what was copied becomes a release, if it is what the manifest says.
place() {
  with_manifest "$incoming" "$4"
  cp -- "$work/manifest" "$incoming/.release" || exit 1
  if [ -e "$releases/$3" ]; then
    ! in_use "$3" || fail "$releases/$3 was changed, and services that were started from it run; stop them first"
    mv -T -- "$releases/$3" "$releases/.damaged" || exit 1
  fi
  mv -T -- "$incoming" "$releases/$3" || exit 1
  rm -rf -- "$releases/.damaged"
}

# switch DIGEST: `current` leads there from now on; "" takes it away again.
switch() {
  if [ -z "$3" ]; then
    rm -f -- "$path/current"
    return
  fi
  [ -d "$releases/$3" ] || fail "$releases/$3 is not there"
  touch -- "$releases/$3"
  rm -f -- "$releases/.current"
  ln -s -- "releases/$3" "$releases/.current" && mv -T -- "$releases/.current" "$path/current"
}

# prune COUNT: of the releases that nobody runs from and that are not current, the newest stay.
prune() {
  kept=0
  current=$(basename "$(readlink "$path/current")")
  find "$releases" -mindepth 1 -maxdepth 1 -type d -printf '%T@ %f\n' | sort -rn | while read -r _ name; do
    case $name in *[!0-9a-f]*) continue ;; esac
    [ -f "$releases/$name/.release" ] || continue
    kept=$((kept + 1))
    if [ "$kept" -le "$3" ] || [ "$name" = "$current" ] || in_use "$name"; then
      continue
    fi
    rm -rf -- "${releases:?}/$name" && echo "removed=$name"
  done
}

# cache FOLDER: make a folder for compiled graphs, from HOME if it is relative, and tell its whole path.
cache() {
  cd || fail "this user has no home"
  (umask 077 && mkdir -p -- "$3") || exit 1
  [ -O "$3" ] || fail "$3 belongs to another; compiled graphs are executed, so they must be $(id -un)'s"
  [ -z "$(find "$3" -prune -perm /022)" ] || fail "$3 can be written to by others; compiled graphs are executed"
  cd -- "$3" && echo "folder=$(pwd)"
}

case $verb in
  prepare) prepare ;;
  hold) hold ;;
  free) free ;;
  has) has "$@" ;;
  place) place "$@" ;;
  switch) switch "$@" ;;
  prune) prune "$@" ;;
  cache) cache "$@" ;;
  *) fail "no such verb: $verb" ;;
esac
