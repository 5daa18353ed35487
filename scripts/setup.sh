# Sourced by the other scripts: goes to the repository's root and offers `python_env`, `debian` and `micropython_of_debian`.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PATH:/usr/sbin:/sbin" PIP_DISABLE_PIP_VERSION_CHECK=1

die() { printf '%s\n' "$*" >&2; exit 1; }

# debian COMMAND=PACKAGE[,PACKAGE]...: installs the packages whose command is missing, or says what to type.
debian() {
  local IFS=$' ,' pair missing=()
  for pair in "$@"; do command -v "${pair%%=*}" >/dev/null || missing+=(${pair#*=}); done
  [ ${#missing[@]} -gt 0 ] || return 0
  local todo="apt-get install --no-install-recommends ${missing[*]}"
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "Missing on this machine: ${missing[*]}. As root, type: $todo"
  echo "Installing Debian packages: ${missing[*]}"
  # The servers among them are for tests, which start their own: Debian must not start one on its usual port.
  local policy=/usr/sbin/policy-rc.d ours= failed=
  [ -e $policy ] || { ours=1; printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; }
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive $todo -y -qq; } >/dev/null || failed=1
  [ -z "$ours" ] || rm -f $policy
  [ -z "$failed" ] || die "That failed. By hand: apt-get update && $todo"
}

# npm_packages NAME@VERSION...: makes .venv/npm/node_modules hold the packages that tests load into a browser, or run.
npm_packages() {
  local stamp=.venv/npm/.installed
  [ "$(cat $stamp 2>/dev/null)" != "$*" ] || return 0
  echo "Installing npm packages: $*"
  npm install --silent --no-audit --no-fund --ignore-scripts --prefix .venv/npm "$@" >/dev/null || die "That failed. By hand: npm install --prefix .venv/npm $*"
  printf '%s' "$*" >$stamp
}

# micropython_of_debian [FOLDER]: makes `micropython` a command: Debian's package, or where this release has none, that of
# trixie with its libraries, in FOLDER (.venv/micropython). Nothing of it is installed into the system.
micropython_of_debian() {
  local folder=${1:-.venv/micropython} packages="micropython libc6 libffi8 libmbedcrypto16 libmbedtls21 libmbedx509-7" apt mirror deb options
  command -v micropython >/dev/null && return 0
  case $(apt-cache policy micropython 2>/dev/null) in *Candidate:\ [0-9]*) debian micropython=micropython; return ;; esac
  if [ ! -x "$folder/bin/micropython" ]; then
    echo "Installing Debian's micropython into $folder"
    apt=$(mktemp -d)
    mkdir -p "$apt"/{lists/partial,archives/partial,debs}
    for _ in lists new_lists; do
      mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
      [ -z "$mirror" ] || break
      apt-get update -qq || true
    done
    [ -n "$mirror" ] || die "No list of Debian's packages. As root, type: apt-get update"
    # apt checks the signatures of this release as of any other; it has lists and a cache of its own here.
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$apt/sources.list"
    options=(-qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State::Lists="$apt/lists"
      -o Dir::State::Status=/dev/null -o Dir::Cache="$apt" -o APT::Sandbox::User= -o APT::Architecture="$(dpkg --print-architecture)")
    apt-get "${options[@]}" update && (cd "$apt/debs" && apt-get "${options[@]}" download $packages) || die "Debian's micropython could not be fetched."
    rm -rf "$folder" && mkdir -p "$folder/bin"
    for deb in "$apt"/debs/*.deb; do dpkg-deb -x "$deb" "$folder"; done
    rm -rf "$apt"
    # It needs a newer libc than this system has: started by the loader that comes with that.
    cat >"$folder/bin/micropython" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/..
lib=$(dirname "$root"/usr/lib/*/libc.so.6)
exec "$lib"/ld-linux*.so.* --library-path "$lib" "$root"/usr/bin/micropython "$@"
WRAPPER
    chmod +x "$folder/bin/micropython"
  fi
  "$folder/bin/micropython" -c '' || die "$folder/bin/micropython does not run. Remove $folder and try again."
  PATH=$PATH:$(readlink -f "$folder/bin")
}

# python_env [EXTRA]: makes .venv hold the project and EXTRA; at once when setup.cfg has not changed since.
python_env() {
  local extra=${1:-} stamp=.venv/.installed-${1:-core} want python
  want=$(cat setup.cfg pyproject.toml | sha256sum; pwd)
  [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
  python=$(command -v python3.11 || command -v python3) || die "Python 3.11 or newer is needed; as root, type: apt-get install python3 python3-venv"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed; this is $("$python" -V)."
  "$python" -c 'import ensurepip' 2>/dev/null || debian ensurepip=python3-venv
  echo "Installing smqrt${extra:+ with [$extra]} into .venv"
  .venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear .venv
  .venv/bin/python -m pip install -qq --editable ".${extra:+[$extra]}"
  # An editable install is an import hook, which Spark and type checkers do not call: they look in folders only.
  printf '%s\n' "$PWD" "$PWD/smqrt/pipeline/entry" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/smqrt-spark.pth"
  printf '%s' "$want" >"$stamp"
}
