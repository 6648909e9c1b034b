# shellcheck shell=bash
# Sourced by ops/up and ops/test: finds what is missing and installs it, each step only where its
# result is not there. Needs $root, the clone.
#
#   MIRROR_SD_PYTHON  the Python for .venv (3.11 or newer); default: the first found
#   MIRROR_SD_TORCH   the requirement that installs torch; default: the release below, its CPU build
#                     where there is no NVIDIA driver (the other one brings gigabytes of CUDA)
#   CXX               the C++ compiler; default: the first found of g++, clang++, c++

root=${root:?is set by the script that sources this}
venv="$root/.venv"
stamp="$venv/.mirror-sd"
native_stamp="$venv/.mirror-sd-native"
torch_release=torch==2.13.0
torch="${MIRROR_SD_TORCH:-$torch_release}"
torch_cpu_index=https://download.pytorch.org/whl/cpu
build_packages=('setuptools>=77' 'nanobind>=3.1') # as [build-system] of pyproject.toml
run_packages=(nginx libnginx-mod-http-lua lua-resty-core lua-resty-lrucache lua-cjson
    libluajit2-5.1-2)
test_packages=(lua-check lua-busted prometheus)

say() { printf 'mirror-sd: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# set_up run|dev|none: `dev` adds what ops/test needs; `none` only looks whether all is there.
set_up() {
    local kind=$1
    if [ "$kind" = none ]; then
        [ -e "$stamp" ] || die "nothing is installed yet: run without --skip-install once"
        return
    fi
    install_packages "$kind"
    is_native_settled || install_compiler
    is_venv_ready "$kind" || install_jemalloc
    is_venv_ready "$kind" || install_venv "$kind"
    is_native_settled || build_native
    is_native_built || say "going on without the C++ engine; this tells why it is not built:" \
        ".venv/bin/python -m mirror_sd.backends.native.build_extension"
}

has_command() { command -v "$1" >/dev/null 2>&1; }

# Debian packages

has_nginx_with_lua() {
    local module
    [ -n "${MIRROR_SD_NGINX:-}" ] && return
    has_command openresty && return
    has_command nginx || [ -x /usr/sbin/nginx ] || return
    for module in /usr/lib/nginx/modules /usr/share/nginx/modules; do
        [ -e "$module/ngx_http_lua_module.so" ] && return
    done
    return 1
}

missing_packages() {
    has_nginx_with_lua || printf '%s\n' "${run_packages[@]}"
    is_venv_ready "$1" || find_python >/dev/null || printf '%s\n' python3 python3-venv
    [ "$1" = dev ] || return 0
    has_command luacheck || printf '%s\n' "${test_packages[0]}"
    has_command busted || printf '%s\n' "${test_packages[1]}"
    has_command promtool || printf '%s\n' "${test_packages[2]}"
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages "$1")
    [ "${#missing[@]}" -gt 0 ] || return 0
    has_command apt-get || die "these are missing, and this is no Debian: ${missing[*]}"
    local as_root=()
    find_root || die "no right to install packages; run once as root, then try again:" \
        "apt-get install -y --no-install-recommends ${missing[*]}"
    say "installing ${missing[*]}"
    forbid_services "${as_root[@]}"
    if ! apt_install "${as_root[@]}"; then
        "${as_root[@]}" apt-get update >&2 || die "apt-get update failed, see above"
        apt_install "${as_root[@]}" || die "apt-get could not install ${missing[*]}, see above"
    fi
    allow_services "${as_root[@]}"
}

# Sets $as_root of its caller to what makes a command run as root.
find_root() {
    [ "$(id -u)" -ne 0 ] || return 0
    has_command sudo && sudo -n true 2>/dev/null && as_root=(sudo -n)
}

# Reads $missing of its caller.
apt_install() {
    "$@" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${missing[@]}" >&2
}

# Reads $missing of its caller, who goes on without where it cannot be installed.
try_install() {
    say "installing ${missing[*]}"
    apt_install "$@" && return
    "$@" apt-get update >&2 && apt_install "$@" ||
        say "could not install ${missing[*]}, see above; going on without"
}

# The packages of nginx and prometheus bring services that would listen on ports 80 and 9090, now
# and after each boot. We run these programs ourselves: while they are installed no service may
# start, and those that come with them are disabled.
policy=/usr/sbin/policy-rc.d
forbid_services() {
    made_policy=no
    [ -e "$policy" ] && return
    printf '#!/bin/sh\nexit 101\n' | "$@" tee "$policy" >/dev/null
    "$@" chmod 755 "$policy"
    made_policy=yes
    # shellcheck disable=SC2064 # the words of now
    trap "$(printf '%q ' "$@" rm -f "$policy")" EXIT
}

allow_services() {
    local package
    if has_command systemctl; then
        for package in nginx prometheus; do
            if [[ " ${missing[*]} " == *" $package "* ]]; then
                "$@" systemctl disable --quiet "$package" 2>/dev/null ||
                    say "could not disable the service $package; it may start with the next boot"
            fi
        done
    fi
    if [ "$made_policy" = yes ]; then
        "$@" rm -f "$policy"
        trap - EXIT
    fi
}

# Python

find_python() {
    local candidate
    for candidate in "${MIRROR_SD_PYTHON:-}" python3.13 python3.12 python3.11 python3 python3.14; do
        if [ -n "$candidate" ] && has_command "$candidate" && "$candidate" -c '
import ensurepip, sys, venv
sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# What an installation depends on. A moved clone is another installation: scripts name their path.
fingerprint() {
    printf '%s\n' "$root" "$torch" "$1"
    sha256sum <"$root/pyproject.toml"
}

is_venv_ready() {
    [ -x "$venv/bin/python" ] && [ -e "$stamp" ] || return
    local content
    content=$(<"$stamp")
    [ "$content" = "$(fingerprint dev)" ] || [ "$content" = "$(fingerprint "$1")" ]
}

install_venv() {
    local kind=$1 python extras=''
    if [ ! -w "$root" ] || { [ -e "$venv" ] && [ ! -w "$venv" ]; }; then
        die "cannot install into $venv: no right to write there; run as its owner"
    fi
    # The lock is on this directory, so it leaves no file behind; it ends with the descriptor.
    exec 9<"$root/ops"
    if ! flock -n 9; then
        say "waiting for another set-up of this clone"
        flock 9
    fi
    if ! is_venv_ready "$kind"; then
        is_venv_sound || rm -rf "$venv"
        if [ ! -e "$venv" ]; then
            python=$(find_python) || die "Python 3.11 or newer with venv is needed"
            say "creating .venv with $("$python" --version)"
            "$python" -m venv "$venv" >&2 || die "cannot create $venv, see above"
        fi
        rm -f "$stamp"
        [ "$kind" = dev ] && extras='[dev]'
        say "installing Python packages; the first time takes minutes"
        # torch first, by itself: it alone decides which build of it is used.
        (cd "$root" &&
            pip_install "${build_packages[@]}" && install_torch &&
            pip_install --no-build-isolation -e ".$extras") ||
            die "pip failed, see above; the next run goes on from here"
        fingerprint "$kind" >"$stamp.new"
        mv "$stamp.new" "$stamp"
    fi
    exec 9<&-
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@" >&2
}

install_torch() {
    if [ -n "${MIRROR_SD_TORCH:-}" ] || has_command nvidia-smi; then
        pip_install "$torch"
        return
    fi
    # The first where the configured index has the CPU build, the last where no other can be had.
    pip_install "$torch_release+cpu" 2>/dev/null ||
        pip_install --extra-index-url "$torch_cpu_index" "$torch_release+cpu" ||
        pip_install "$torch_release"
}

# A .venv that another clone left, or that was interrupted while it was made, is of no use.
is_venv_sound() {
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return
    [ ! -e "$stamp" ] || [ "$(head -n 1 "$stamp")" = "$root" ]
}

# The C++ part, mirror_sd._native. It is optional: nothing here ends the set-up.

find_compiler() {
    local candidate
    for candidate in ${CXX:+"$CXX"} g++ clang++ c++; do
        # shellcheck disable=SC2086 # CXX may hold arguments
        has_command ${candidate%% *} && printf '%s\n' "$candidate" && return
    done
    return 1
}

has_python_headers() {
    "$1" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' 2>/dev/null
}

# What a build depends on; another one, or none, is made where it changed.
native_fingerprint() {
    (cd "$root" || exit
        find_compiler || true
        sha256sum mirror_sd/backends/native/build_extension.py \
            mirror_sd/backends/native/src/* mirror_sd/speculative/src/*) | sha256sum
}

is_native_built() { compgen -G "$root/mirror_sd/_native*.so" >/dev/null; }

# True if these sources were built, or could not be.
is_native_settled() {
    [ -e "$native_stamp" ] && [ "$(<"$native_stamp")" = "$(native_fingerprint) $(native_state)" ]
}

native_state() { if is_native_built; then echo built; else echo failed; fi; }

install_compiler() {
    local missing=() as_root=() python
    python=$venv/bin/python
    [ -x "$python" ] || python=$(find_python) || return 0
    find_compiler >/dev/null || missing+=(g++)
    has_python_headers "$python" ||
        missing+=("python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev")
    [ "${#missing[@]}" -gt 0 ] || return 0
    if ! has_command apt-get || ! find_root; then
        say "the C++ engine needs ${missing[*]}, which cannot be installed from here"
        return 0
    fi
    try_install "${as_root[@]}"
}

# Workers do without, on the malloc of the C library; the log of their pool says so.
install_jemalloc() {
    local missing=(libjemalloc2) as_root=()
    ! compgen -G '/usr/lib*/libjemalloc.so.2' >/dev/null || return 0
    ! compgen -G '/usr/lib/*/libjemalloc.so.2' >/dev/null || return 0
    if has_command apt-get && find_root; then
        try_install "${as_root[@]}"
    fi
}

build_native() {
    if [ ! -w "$root/mirror_sd" ] || [ ! -w "$venv" ]; then
        say "the C++ engine is not up to date, and there is no right to build it here"
        return 0
    fi
    say "building the C++ engine"
    "$venv/bin/python" -P "$root/mirror_sd/backends/native/build_extension.py" >&2 ||
        rm -f "$root"/mirror_sd/_native*.so # it is of older sources
    printf '%s %s\n' "$(native_fingerprint)" "$(native_state)" >"$native_stamp.new"
    mv "$native_stamp.new" "$native_stamp"
}
