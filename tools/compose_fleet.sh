# Part of compose_test.sh: a fleet under load. Four executors; two are killed, one is drained, all are
# replaced; a second scheduler joins, the busy one of the two is stopped and comes back, and then the
# other one is killed. The steps are those of docs/operations.md ("Executors that are lost", "Rolling
# upgrade", "Several schedulers"). All the while compose_load.py asks, and no stream of its may be
# lost or changed.
# shellcheck shell=bash disable=SC2154

readonly num_executors=4
load='' busy=''

load_says() { podman logs "$load" 2>/dev/null | grep -c "^$1" || true; }

check_load() { # no stream went wrong so far
    is_running "$load" && [ "$(load_says wrong)" -eq 0 ] ||
        { podman logs "$load" | grep ^wrong >&2 || podman logs --tail 20 "$load" >&2; fail "a stream was lost or changed: $1"; }
}

has_ended() { [ "$(load_says ended)" -ge "$1" ]; } # COUNT

# As many as run at a time. What they brought counts for whatever happened meanwhile.
check_streams() { # WHAT-HAPPENED
    wait_for 600 "streams go on: $1" has_ended $(($(load_says ended) + 9))
    check_load "$1"
}

start_fleet() {
    # More schedulers than one: a port of the machine's for each. Here any will do.
    export SPLITSERVE_PORT=127.0.0.1:
    # Less than a stream takes: what runs on whoever is drained is moved, too.
    export SPLITSERVE_DRAIN_TIMEOUT_S=1
    up --scale executor=$num_executors
    wait_for 600 "splitserve info shows $num_executors connected executors" has_executors $num_executors
    wait_for 600 'the gateway is ready' curl --silent --fail "localhost:$http_port/health/ready"
}

start_load() {
    load=$(podman run --detach --network "${project}_default" --stop-timeout 600 \
        --no-healthcheck --label "io.podman.compose.project=$project" \
        --volume "$PWD/tools/compose_load.py:/load.py:ro" --entrypoint python "$scheduler_image" \
        /load.py dns:scheduler:50051 gateway:8000)
    wait_for 600 'the load runs, or has ended' is_under_load
    check_load 'nothing happened'
}
is_under_load() { [ "$(load_says running)" -eq 1 ] || ! is_running "$load"; }
is_running() { [ "$(podman inspect -f '{{.State.Status}}' "$1")" = running ]; }

check_kills() {
    local victims victim
    mapfile -t -n 2 victims < <(of_service executor)
    for victim in "${victims[@]}"; do crash "$victim"; done
    say 'killed two of the executors'
    for victim in "${victims[@]}"; do
        wait_for 600 'its restart policy started it again' was_restarted "$victim"
    done
    wait_for 600 'all executors are back' has_executors $num_executors
    check_streams 'two executors killed'
}

address_of() { # CONTAINER: of an executor, as splitserve info shows it
    podman inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}:50052' "$1"
}

check_drain() {
    local leaving scheduler
    # Not `head`: whoever writes to it when it has gone is killed, and the script with it.
    mapfile -t -n 1 leaving < <(of_service executor)
    scheduler=$(of_service scheduler)
    timeout 600 podman exec "$scheduler" splitserve drain "$(address_of "$leaving")" >"$scratch/drain" 2>&1 ||
        { cat "$scratch/drain" >&2; fail 'splitserve drain'; }
    say "$(cat "$scratch/drain")"
    wait_for 600 'it is not connected any more' has_executors $((num_executors - 1))
    podman restart --time 240 "$leaving" >/dev/null 2>&1 || fail 'podman restart'
    wait_for 600 'its next process is welcome' has_executors $num_executors
    check_streams 'an executor drained'
}

stop() { # CONTAINER: as its grace period allows; it ends by itself
    local code
    timeout 300 podman stop --time 240 "$1" >/dev/null 2>&1 || fail "podman stop $1"
    code=$(podman inspect -f '{{.State.ExitCode}}' "$1")
    [ "$code" -eq 0 ] || fail "$(podman inspect -f '{{.Name}}' "$1") ended with $code on SIGTERM"
}

check_rolling_upgrade() {
    local old each
    mapfile -t old < <(of_service executor)
    up --no-recreate --scale executor=$((2 * num_executors)) executor
    wait_for 600 'the new executors are connected' has_executors $((2 * num_executors))
    for each in "${old[@]}"; do
        stop "$each"
        podman rm "$each" >/dev/null
    done
    wait_for 600 'the old ones are gone' has_executors $num_executors
    check_streams 'all executors replaced'
}

check_two_schedulers() {
    local first second
    first=$(of_service scheduler)
    up --no-recreate --scale scheduler=2 scheduler
    second=$(of_service scheduler | grep -v "^$first")
    # Who prefers whom is by hash; the two together have all.
    wait_for 600 'a second scheduler is there' is_healthy "$second"
    sees_all 'a second scheduler'
}

num_running() { # SCHEDULER: requests that are under way on its executors
    podman exec "$1" splitserve info --json | python3 -c 'import json, sys
print(sum(e["num_running_requests"] for e in json.load(sys.stdin)["executors"]))'
}

# The load stays with a scheduler as long as that serves.
find_busy() { # sets `busy`
    local each most=0 count
    for each in $(of_service scheduler); do
        count=$(num_running "$each") || return 1
        [ "$count" -le "$most" ] || { busy=$each most=$count; }
    done
    [ "$most" -gt 0 ]
}

check_scheduler_stops() {
    stop "$busy"
    say 'stopped the scheduler that had the load; it has ended by itself'
    sees_all 'a scheduler stopped'
    podman start "$busy" >/dev/null 2>&1 || fail 'podman start'
    wait_for 600 'it is back' is_healthy "$busy"
    sees_all 'a scheduler came back'
}

check_scheduler_killed() {
    crash "$busy"
    say 'killed the scheduler that had the load'
    wait_for 600 'its restart policy started it again' was_restarted "$busy"
    sees_all 'a scheduler killed'
}

sees_all() { # WHAT-HAPPENED
    wait_for 600 "all executors are connected: $1" has_executors $num_executors
    check_streams "$1"
}

stop_load() {
    podman stop --time 600 "$load" >/dev/null 2>&1 || fail 'podman stop'
    say "under all of this: $(podman logs "$load" | tail -1)"
    [ "$(podman inspect -f '{{.State.ExitCode}}' "$load")" -eq 0 ] ||
        { podman logs "$load" | grep ^wrong >&2; fail 'a stream was lost or changed'; }
    podman rm "$load" >/dev/null
    load=''
}

check_fleet() {
    start_fleet
    start_load
    check_kills
    check_drain
    check_rolling_upgrade
    check_two_schedulers
    wait_for 600 'one of the schedulers has the load' find_busy
    check_scheduler_stops
    wait_for 600 'one of the schedulers has the load' find_busy
    check_scheduler_killed
    stop_load
    check_stop
    export SPLITSERVE_PORT=$port
    unset SPLITSERVE_DRAIN_TIMEOUT_S
}
