#!/bin/sh
# What `run_pd.sh code` does on a machine that has no code yet: code.sh PATH, which is hosts.path there.
# It is sent as the text of `sh -c` and asked on standard input, a line for each step: VERB [ARGUMENT …]. Every answer is
# lines `name=value` or a complaint, and then `end=` and an exit status, 0 if it was done. It ends when its input does.
# Nothing outside of PATH/releases is ever removed. POSIX, with GNU coreutils and findutils, flock and rsync.
set -u
LC_ALL=C
export LC_ALL
unset CDPATH

path=$1
releases=$path/releases
incoming=$releases/.incoming
work=

fail() {
  echo "$*"
  exit 1
}

# Make the folders, and keep others out for as long as this runs; tell the current release, and KiB that are free.
prepare() {
  for tool in rsync flock sha256sum find df cmp diff head; do
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
  free
}

hold() {
  flock -n 9 || fail "another run_pd.sh code is at work in $path there (pid $(cat "$releases/.lock.pid" 2>/dev/null))"
  echo "$$" >"$releases/.lock.pid"
  rm -rf -- "$incoming" "$releases/.damaged" || fail "what an interrupted copy left in $releases cannot be removed"
}

free() {
  echo "free_kib=$(df -Pk "$releases" | awk 'NR == 2 { print $4 }')"
}

# manifest BYTES SHA256: what follows on standard input says what the tree holds.
manifest() {
  head -c "$1" >"$work/manifest" || fail "no room for the manifest in $work"
  [ "$(sha256sum <"$work/manifest" | cut -d ' ' -f 1)" = "$2" ] || fail "the manifest arrived damaged, or $work is full"
}

# Compare a folder with the manifest: each file, nothing else, and what may be executed.
compare() {
  cd -- "$1" || exit 1
  sed -n 's/^[FX] //p' "$work/manifest" | sha256sum --check --quiet --strict >"$work/wrong" 2>&1 \
    || fail "$1: $(grep -v WARNING "$work/wrong" | head -n 3 | tr '\n' ' ')"
  sed 's/^\([FX]\) [0-9a-f]*  /\1 /' "$work/manifest" | sort >"$work/told"
  listing | sort >"$work/found"
  cmp -s "$work/told" "$work/found" \
    || fail "$1: more or fewer files, or other modes: $(diff "$work/told" "$work/found" | grep '^[<>]' | head -n 3 | tr '\n' ' ')"
}

listing() {
  files -type l -print | while IFS= read -r link; do printf 'L %s -> %s\n' "$link" "$(readlink "$link")"; done
  files -type f -perm -0100 -print | sed 's/^/X /'
  files -type f ! -perm -0100 -print | sed 's/^/F /'
}

# Those of the tree, without what running it and making its environment leaves.
files() {
  find . \( -name .venv -o -name __pycache__ -o -name '*.egg-info' -o -path ./.release \) -prune -o "$@"
}

# Whether a run record names the release, or one that only another user may read could.
in_use() {
  for record in "$path"/run/*/state.json; do
    [ ! -e "$record" ] || [ -r "$record" ] || return 0
  done
  grep -qsF "releases/$1" "$path"/run/*/state.json
}

# has DIGEST: whether that release is there, whole.
has() {
  if [ ! -d "$releases/$1" ]; then
    echo "has=no"
  elif (compare "$releases/$1"); then
    echo "has=yes"
  else
    echo "has=damaged"
  fi
}

# place DIGEST: what was copied becomes a release, if it is what the manifest says.
place() {
  (compare "$incoming") || exit 1
  cp -- "$work/manifest" "$incoming/.release" || exit 1
  if [ -e "$releases/$1" ]; then
    ! in_use "$1" || fail "$releases/$1 was changed, and services that were started from it run; stop them first"
    mv -T -- "$releases/$1" "$releases/.damaged" || exit 1
  fi
  mv -T -- "$incoming" "$releases/$1" || exit 1
  rm -rf -- "$releases/.damaged"
}

# switch DIGEST: `current` leads there from now on; none: it leads nowhere.
switch() {
  if [ $# -eq 0 ]; then
    rm -f -- "$path/current"
    return
  fi
  [ -d "$releases/$1" ] || fail "$releases/$1 is not there"
  touch -- "$releases/$1"
  rm -f -- "$releases/.current"
  ln -s -- "releases/$1" "$releases/.current" && mv -T -- "$releases/.current" "$path/current"
}

# prune COUNT: of the releases that nobody runs from and that are not current, the newest stay.
prune() {
  kept=0
  current=$(basename "$(readlink "$path/current")")
  find "$releases" -mindepth 1 -maxdepth 1 -type d -printf '%T@ %f\n' | sort -rn | while read -r _ name; do
    case $name in *[!0-9a-f]*) continue ;; esac
    [ -f "$releases/$name/.release" ] || continue
    kept=$((kept + 1))
    if [ "$kept" -le "$1" ] || [ "$name" = "$current" ] || in_use "$name"; then
      continue
    fi
    rm -rf -- "${releases:?}/$name" && echo "removed=$name"
  done
}

# cache FOLDER: make a folder for compiled graphs, from HOME if it is relative, and tell its whole path.
cache() {
  cd || fail "this user has no home"
  (umask 077 && mkdir -p -- "$1") || exit 1
  [ -O "$1" ] || fail "$1 belongs to another; compiled graphs are executed, so they must be $(id -un)'s"
  [ -z "$(find "$1" -prune -perm /022)" ] || fail "$1 can be written to by others; compiled graphs are executed"
  cd -- "$1" && echo "folder=$(pwd)"
}

echo # what a start-up file of the shell has said ends here, should it not have ended its line
(prepare) 2>&1 && exec 9>"$releases/.lock" && (hold) 2>&1 && work=$(mktemp -d)
status=$?
trap 'rm -rf -- "$work"' EXIT
trap 'exit 1' HUP INT TERM PIPE
echo "end=$status"
while [ "$status" -eq 0 ] && IFS= read -r line; do
  verb=${line%% *}
  rest=${line#"$verb"}
  rest=${rest# }
  # shellcheck disable=SC2086 # arguments are digests and numbers, but for the folder of cache
  case $verb in
    cache) (cache "$rest") 2>&1 ;;
    free | has | manifest | place | switch | prune) ("$verb" $rest) 2>&1 ;;
    *) false ;;
  esac
  echo "end=$?"
done
