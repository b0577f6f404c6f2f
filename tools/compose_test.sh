#!/usr/bin/env bash
# Tries docker-compose.yml for real, with podman: builds the images, starts one scheduler, two executors
# and a gateway, generates text through the published ports, crashes an executor and the scheduler while
# streams run, and stops everything; then a fleet under load (compose_fleet.sh); then once more over TLS
# (docker-compose.tls.yml); then what watches it (compose_observability.sh; `compose_test.sh
# observability` for that alone). Run by `make compose-test`; the exit code tells. It installs nothing on the
# machine, and what it starts it removes.
#
#   BASE_IMAGE     base of the images; without it python:3.11-slim if a registry answers, otherwise
#                  a Debian root file system made by debootstrap (needs root), kept for next time
#   DEBIAN_MIRROR  where debootstrap finds Debian, if not at its own default
#   TORCH          default torch==2.13.0
#   PORT           port to publish (default: 50951); HTTP_PORT (default: 8951); LIVE_PORT (default: 8952)
#   KEEP_IMAGES=1  leaves the images in place, so that the next run builds faster
set -euo pipefail
cd "$(dirname "$0")/.."

readonly project=splitserve-compose-test
# With compilers: the images are built without a network.
readonly local_base=localhost/splitserve-base:bookworm-compilers
readonly wheels=$PWD/.tools/compose-test/wheels
readonly port=${PORT:-50951}
readonly http_port=${HTTP_PORT:-8951} live_port=${LIVE_PORT:-8952}
export SPLITSERVE_TAG=compose-test SPLITSERVE_PORT=$port SPLITSERVE_HTTP_PORT=$http_port
export SPLITSERVE_LIVE_PORT=$live_port
export TORCH=${TORCH:-torch==2.13.0}
readonly base_file=.compose-test.yml
readonly scheduler_image=localhost/splitserve-scheduler:$SPLITSERVE_TAG
readonly executor_image=localhost/splitserve-executor:$SPLITSERVE_TAG
readonly gateway_image=localhost/splitserve-gateway:$SPLITSERVE_TAG
started=$SECONDS
# shellcheck source=tools/compose_fleet.sh
. tools/compose_fleet.sh
# shellcheck source=tools/compose_observability.sh
. tools/compose_observability.sh

say() { printf '[%3ds] %s\n' $((SECONDS - started)) "$*"; }
fail() { say "FAILED: $*" >&2; exit 1; }
# podman without systemd complains that it cannot run health checks by timer; we run them ourselves.
quietly() { "$@" 2> >(grep -v -e 'systemd connection' >&2 || true); }
containers() { podman ps --all --quiet --filter "label=io.podman.compose.project=$project" "$@"; }
of_service() { containers --filter "label=com.docker.compose.service=$1" "${@:2}"; }
compose() { quietly podman-compose --project-name "$project" --in-pod false "$@"; }

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >"$scratch/wait" 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || { cat "$scratch/wait" >&2; fail "no $what in time"; }
        sleep 0.5
    done
    say "$what"
}

clean_up() {
    local code=$?
    trap - EXIT INT TERM
    if [ "$code" -ne 0 ]; then
        for id in $(containers); do
            echo "--- log of $(podman inspect -f '{{.Name}} {{.State.Status}}' "$id"), the end" >&2
            podman logs --tail 30 "$id" >&2 || true
        done
    fi
    jobs -p | xargs -r kill 2>/dev/null || true
    containers | xargs -r timeout 600 podman rm --force --time 5 >/dev/null 2>&1 || true
    compose_tls down --volumes >/dev/null 2>&1 || true
    if [ -z "${KEEP_IMAGES:-}" ]; then
        podman rmi --force "$scheduler_image" "$executor_image" "$gateway_image" >/dev/null 2>&1 || true
        podman image prune --force --filter label=org.opencontainers.image.title=splitserve \
            >/dev/null 2>&1 || true
    fi
    rm -rf "$scratch" "$base_file"
    if [ "$code" -eq 0 ]; then say 'compose-test: passed'; else say 'compose-test: failed' >&2; fi
    exit "$code"
}

# --- what has to be there ------------------------------------------------------------------------

need() { # COMMAND HOW-TO-GET-IT
    command -v "$1" >/dev/null || { echo "missing: $1 ($2)" >&2; missing=1; }
}

check_machine() {
    local missing=''
    need podman 'Debian: apt-get install podman'
    need curl 'Debian: apt-get install curl'
    need podman-compose 'pip install podman-compose'
    need python3 'Debian: apt-get install python3 python3-venv'
    [ -z "$missing" ] || exit 1
    [ "$(podman info -f '{{.Host.NetworkBackend}}')" != cni ] ||
        [ -x /usr/lib/cni/dnsname ] || [ -x /opt/cni/bin/dnsname ] ||
        fail 'names do not resolve between containers; Debian: apt-get install' \
            'golang-github-containernetworking-plugin-dnsname dnsmasq-base containernetworking-plugins'
}

# Where the runtime cannot start anything (no systemd, inside a virtual machine or container), these
# settings help; they are the machine's, so this script only names them.
explain_runtime() {
    cat >&2 <<'TEXT'
podman cannot start a container here. Where there is no systemd, this helps:
  Debian: apt-get install runc
  /etc/containers/containers.conf:
    [containers]
    default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
    [engine]
    runtime = "runc"
    cgroup_manager = "cgroupfs"
TEXT
    exit 1
}

# --- the base image and the wheels ---------------------------------------------------------------

choose_base() {
    if [ -z "${BASE_IMAGE:-}" ]; then
        if podman image exists "$local_base"; then
            BASE_IMAGE=$local_base
        elif timeout 120 podman pull --quiet docker.io/library/python:3.11-slim >/dev/null 2>&1; then
            BASE_IMAGE=docker.io/library/python:3.11-slim
        else
            make_base
            BASE_IMAGE=$local_base
        fi
    fi
    export BASE_IMAGE
    say "base image: $BASE_IMAGE"
    podman run --rm "$BASE_IMAGE" python3 --version || explain_runtime
}

make_base() {
    local missing=''
    need debootstrap 'Debian: apt-get install debootstrap; or set BASE_IMAGE'
    [ -z "$missing" ] || exit 1
    [ "$(id -u)" -eq 0 ] || fail 'debootstrap needs root; or set BASE_IMAGE'
    say 'no registry in reach: a Debian root file system by debootstrap (minutes, once)'
    local root=$scratch/root
    debootstrap --variant=minbase \
        --include=python3,python3-venv,python3-dev,ca-certificates,gcc,g++,libc6-dev bookworm "$root" \
        ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$scratch/debootstrap.log" 2>&1 ||
        { tail -20 "$scratch/debootstrap.log" >&2; fail 'debootstrap'; }
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -c . | podman import --change 'CMD ["python3"]' - "$local_base" >/dev/null 2>&1
    rm -rf "$root"
}

# The host's pip knows where packages are; the builds then need no network at all.
gather_wheels() {
    say "wheels for Python 3.11 in ${wheels#"$PWD"/}"
    mkdir -p "$wheels"
    python3 - >"$scratch/requirements" <<'PYTHON'
import re
text = open("pyproject.toml").read()
installed = re.findall(r'\.whl\)\[([a-z,-]+)\]', open("Dockerfile").read())
extras = sorted({extra for extras in installed for extra in extras.split(",")})
for name in ("requires", "dependencies", *extras):
    block = re.search(rf"^{name} = \[(.*?)\]", text, re.M | re.S).group(1)
    print(*re.findall(r'"([^"]+)"', block), sep="\n")
PYTHON
    timeout 1200 python3 -m pip --disable-pip-version-check download --quiet --dest "$wheels" \
        --find-links "$wheels" --only-binary :all: --python-version 3.11 --implementation cp \
        --constraint constraints.txt "$TORCH" --requirement "$scratch/requirements" >"$scratch/pip.log" 2>&1 ||
        { tail -20 "$scratch/pip.log" >&2; fail 'pip download'; }
}

build_images() {
    say 'building the images'
    timeout 1800 podman-compose --project-name "$project" --parallel 1 --podman-build-args \
        "--format docker --network none --volume $wheels:/wheels:ro" \
        build --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels \
        >"$scratch/build.log" 2>&1 || { tail -40 "$scratch/build.log" >&2; fail 'build'; }
    podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep ":$SPLITSERVE_TAG "
}

# --- what is tried -------------------------------------------------------------------------------

check_images() {
    local image
    for image in "$scheduler_image" "$gateway_image"; do
        podman run --rm --entrypoint python "$image" -c '
import importlib.util as u, os
found = [name for name in ("torch", "transformers") if u.find_spec(name)]
assert not found, f"the image has {found}"
assert os.getuid() != 0, "the image runs as root"' 2>"$scratch/err" ||
            fail "$image: $(tail -1 "$scratch/err")"
    done
    say 'the images of scheduler and gateway have neither torch nor transformers'
    podman run --rm --network none --entrypoint python "$executor_image" \
        -m splitserve_kernels.toolchain 2>"$scratch/err" || fail "$executor_image: $(cat "$scratch/err")"
    [ "$(podman run --rm --entrypoint sh "$executor_image" -c 'ls /opt/splitserve/kernels | wc -l')" -ge 1 ] ||
        fail "$executor_image has no CPU kernels"
    say 'the image of the executor compiles a C module, and has the CPU kernels'
}

# Only who is in a scheduler's container reaches its address for operators.
has_executors() { # COUNT: connected and not draining, at all schedulers together
    local count=0 scheduler here
    for scheduler in $(of_service scheduler --filter status=running); do
        podman exec "$scheduler" splitserve info --json >"$scratch/info" && here=$(python3 -c 'import json, sys
print(sum(e["connected"] and not e["draining"] for e in json.load(sys.stdin)["executors"]))' \
            <"$scratch/info") || return 1
        count=$((count + here))
        cat "$scratch/info"
    done
    [ "$count" -eq "$1" ]
}

is_healthy() { podman healthcheck run "$1"; }

up() { # OPTION...
    # Two rows at a time: the streams below then last long enough to be interrupted.
    # Numbers of 32 bits: texts are the same however their tokens are computed again.
    SPLITSERVE_MAX_NUM_SEQS=2 SPLITSERVE_THREADS=1 SPLITSERVE_DTYPE=float32 timeout 600 podman-compose \
        --project-name "$project" --in-pod false ${compose_args:-} up --detach --no-build "$@" \
        >"$scratch/up.log" 2>&1 || { cat "$scratch/up.log" >&2; fail 'podman-compose up'; }
    say "podman-compose up $*"
}

start_all() {
    up --scale executor=2
    wait_for 600 'splitserve info shows 2 connected executors' has_executors 2
    local id
    for id in $(containers); do
        wait_for 600 "$(podman inspect -f '{{.Name}}' "$id") is healthy" is_healthy "$id"
    done
}

check_text() {
    local text
    text=$(timeout 600 podman run --rm --network host --env "SPLITSERVE_ADDRESS=127.0.0.1:$port" \
        "$scheduler_image" generate --max-tokens 40 'Tell me a story about a dragon.' \
        2>"$scratch/err") || { cat "$scratch/err" >&2; fail 'splitserve generate'; }
    [ -n "$text" ] || fail 'splitserve generate printed nothing'
    say "splitserve generate: ${text:0:70}"
}

ask_gateway() { # BODY: what the gateway says to it, through its published port
    curl --silent --show-error --fail --no-buffer --max-time 600 "localhost:$http_port/v1/completions" \
        --header 'content-type: application/json' --data "$1"
}

check_gateway() {
    wait_for 600 'the gateway is ready' curl --silent --fail "localhost:$http_port/health/ready"
    ask_gateway '{"prompt": "Tell me a story about a dragon.", "max_tokens": 40}' >"$scratch/http" ||
        fail 'curl'
    say "curl: $(head -c 150 "$scratch/http")"
    # The first line of what the live page draws; curl ends when nobody reads on.
    { curl --silent --max-time 60 "localhost:$live_port/feed" || true; } | head -n 1 >"$scratch/frame"
    grep -q '"state":"serving"' "$scratch/frame" || fail 'the live page shows no executor'
    say 'the live page shows the executors'
}

crash() { # CONTAINER: as a crash; the restart policy does not apply to `podman kill`
    kill -KILL "$(podman inspect -f '{{.State.Pid}}' "$1")"
}

was_restarted() { # CONTAINER: by its restart policy
    case $(podman inspect -f '{{.State.Status}} {{.RestartCount}}' "$1") in
        'running '[1-9]*) ;;
        *) return 1 ;;
    esac
}

readonly http_streams='1 2 3 4' http_tokens=1200
start_http_streams() { # NAME: streams of the gateway, to files of that name
    local seed
    pids=()
    for seed in $http_streams; do
        ask_gateway '{"prompt": "Once upon a time", "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true}, "seed": '"$seed, \"max_tokens\": $http_tokens}" \
            >"$scratch/$1.$seed" 2>&1 &
        pids+=($!)
    done
}

wait_http_streams() { # NAME: their texts are in NAME.texts; each has all of its tokens
    local pid seed
    for pid in "${pids[@]}"; do wait "$pid" || fail "a stream of the gateway broke ($1)"; done
    for seed in $http_streams; do
        python3 - "$scratch/$1.$seed" "$http_tokens" <<'PYTHON' || fail "a stream is wrong ($1)"
import json, sys
*lines, last = [line for line in open(sys.argv[1]) if line.startswith("data: ")]
events = [json.loads(line[6:]) for line in lines]
assert last == "data: [DONE]\n", last
assert events[-1]["usage"]["completion_tokens"] == int(sys.argv[2]), events[-1]
print(json.dumps("".join(c["text"] for event in events for c in event["choices"])))
PYTHON
    done >"$scratch/$1.texts"
}

are_under_way() { # NAME
    local seed
    for seed in $http_streams; do
        [ "$(grep -c '^data: ' "$scratch/$1.$seed")" -lt 20 ] || return 0
    done
    return 1
}

check_http_streams() { # SERVICE: its crash changes nothing of what clients of the gateway read
    local victim
    start_http_streams "$1"
    wait_for 600 'streams of the gateway are running' are_under_way "$1"
    victim=$(of_service "$1")
    victim=${victim%%$'\n'*}
    crash "$victim"
    say "killed $(podman inspect -f '{{.Name}}' "$victim") in mid-stream"
    ! grep -q DONE "$scratch/$1".? || fail 'a stream ended too early to tell'
    wait_for 600 'its restart policy started it again' was_restarted "$victim"
    wait_for 600 'all executors are connected' has_executors 2
    wait_http_streams "$1"
    cmp "$scratch/whole.texts" "$scratch/$1.texts" || fail 'a stream has another text than without the crash'
    say "every stream of the gateway has the text that it has without a crash"
}

check_crash() {
    podman run --rm --network "${project}_default" --volume "$PWD/tools/compose_probe.py:/probe.py:ro" \
        --entrypoint python "$scheduler_image" /probe.py scheduler:50051 >"$scratch/streams" 2>&1 &
    local streams=$! victim
    wait_for 600 'streams are running' grep -q running "$scratch/streams"
    victim=$(of_service executor)
    victim=${victim%%$'\n'*}
    crash "$victim"
    say "killed $(podman inspect -f '{{.Name}}' "$victim") in mid-stream"
    ! grep -q ended "$scratch/streams" || fail 'the streams ended too early to tell'
    timeout 600 tail --pid "$streams" -f /dev/null || fail 'the streams hang'
    wait "$streams" || { cat "$scratch/streams" >&2; fail 'a stream broke'; }
    say "every stream finished; $(grep ended "$scratch/streams")"
    wait_for 600 'its restart policy started it again' was_restarted "$victim"
    wait_for 600 'all executors are connected' has_executors 2
}

check_stop() {
    local id code
    for id in $(of_service gateway) $(of_service executor) $(of_service scheduler); do
        podman stop --time 240 "$id" >/dev/null 2>&1 || fail "podman stop $id"
        code=$(podman inspect -f '{{.State.ExitCode}}' "$id")
        [ "$code" -eq 0 ] || fail "$(podman inspect -f '{{.Name}}' "$id") ended with $code on SIGTERM"
    done
    # podman-compose may remove a container before those that depend on it; a second call mends that.
    for _ in 1 2; do
        compose down --volumes --remove-orphans >"$scratch/down.log" 2>&1 || true
        [ -n "$(containers)" ] || break
    done
    [ -z "$(containers)" ] || { cat "$scratch/down.log" >&2; fail 'down left containers'; }
    say 'all stop on SIGTERM with exit code 0; down leaves nothing'
}

compose_tls() { compose --file "$base_file" --file docker-compose.tls.yml --profile setup "$@"; }
# podman-compose cannot merge a variable that is only named with one that has a value.
write_base_file() {
    local valued
    valued=$(grep -oE 'SPLITSERVE_[A-Z_]+=' docker-compose.tls.yml | tr -d '=' | sort -u | paste -sd '|')
    grep -vE "^ +- ($valued)$" docker-compose.yml >"$base_file"
}
of_operator() { compose_tls run --rm -T --entrypoint "$1" operator "${@:2}"; }

ask_gateway_securely() { # CURL-OPTION...
    curl --silent --show-error --max-time 600 --cacert "$scratch/ca.crt" --output "$scratch/https" \
        --write-out '%{http_code}' "https://localhost:$http_port/v1/models" "$@"
}

is_ready_securely() {
    curl --silent --fail --cacert "$scratch/ca.crt" "https://localhost:$http_port/health/ready"
}

check_tls() { # docker-compose.tls.yml: who has a key is answered, over TLS alone
    local id key
    write_base_file
    compose_tls run --rm -T setup >"$scratch/setup.log" 2>&1 ||
        { cat "$scratch/setup.log" >&2; fail 'setup'; }
    SPLITSERVE_THREADS=1 compose_tls up --detach --no-build scheduler executor gateway \
        >"$scratch/up.log" 2>&1 || { cat "$scratch/up.log" >&2; fail 'up over TLS'; }
    of_operator cat /etc/splitserve/operator/ca.crt >"$scratch/ca.crt"
    key=$(compose_tls run --rm -T setup \
        'splitserve keys add /etc/splitserve/scheduler/keys.json --tenant compose-test' \
        2>"$scratch/err" | tail -1)
    case $key in sk-ss-*) ;; *) cat "$scratch/err" >&2; fail 'splitserve keys add' ;; esac
    wait_for 600 'the gateway is ready over TLS' is_ready_securely
    [ "$(ask_gateway_securely --header "authorization: Bearer $key")" = 200 ] ||
        fail "a caller with a key: $(cat "$scratch/https")"
    [ "$(ask_gateway_securely)" = 401 ] || fail 'a caller without a key is not refused'
    ! curl --silent --fail --max-time 10 "http://localhost:$http_port/health/live" >/dev/null ||
        fail 'the gateway answers in plain text'
    of_operator splitserve info --json >"$scratch/info" || fail 'splitserve info over TLS'
    for id in $(of_service scheduler) $(of_service executor) $(of_service gateway); do
        wait_for 600 "$(podman inspect -f '{{.Name}}' "$id") is healthy over TLS" is_healthy "$id"
    done
    say 'over TLS: who has a key is answered, who has none is not; operators are told'
    compose_tls down --volumes --remove-orphans >"$scratch/down.log" 2>&1 || true
}

check_machine
trap clean_up EXIT
trap 'exit 130' INT TERM
scratch=$(mktemp -d)
choose_base
gather_wheels
build_images
if [ "${1:-}" = observability ]; then
    check_observability
    exit
fi
check_images
start_all
check_text
check_gateway
check_crash
start_http_streams whole
wait_http_streams whole
check_http_streams executor
check_http_streams scheduler
check_stop
check_fleet
check_tls
check_observability
